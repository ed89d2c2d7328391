"""The classifier's formula on the published weights, its options, and its batches."""

import numpy as np
import pytest
import tensorflow as tf
from finetune_tools import BERT, make_config

from tfwd import _keras
from tfwd import parametrizations as P
from tfwd.finetune import pretrained_folder
from tfwd.finetune.data import batches
from tfwd.finetune.model import (
    classifier_of,
    make_model,
    named_weights,
    parametrization,
    reinitialize,
)
from tfwd.finetune.program import PROGRAM
from tfwd.finetune.resumable_dropout import Dropout
from tfwd.layers import transformer as T
from tfwd.runs.errors import UserError


@pytest.fixture(scope="module")
def vocabulary(data, pretrained):
    return PROGRAM.read_data(make_config(data, pretrained)).vocabulary


def filled(config, vocabulary):
    model = make_model(config, vocabulary)
    path = config.model.pretrained
    missing = pretrained_folder.load_weights(classifier_of(model).encoder, path)
    return model, missing


IDS = np.array([[2, 5, 9, 3, 0, 0], [2, 7, 3, 0, 0, 0], [2, 8, 9, 10, 11, 3]], np.int32)


@pytest.mark.parametrize("pooling", ["cls", "pooler", "mean"])
def test_the_formula_on_published_weights(data, pretrained, vocabulary, pooling):
    config = make_config(data, pretrained, model__pooling=pooling)
    model, missing = filled(config, vocabulary)
    weights = {name: v.numpy().astype(np.float64) for name, v in named_weights(model).items()}
    bert = T.Bert.from_pretrained(BERT, add_pooler=True)
    outputs = bert(IDS)
    hidden = outputs["last_hidden_state"].numpy().astype(np.float64)
    if pooling == "cls":
        read = hidden[:, 0]
    elif pooling == "pooler":
        read = outputs["pooler_output"].numpy()
    else:
        read = np.stack([h[: (ids != 0).sum()].mean(0) for h, ids in zip(hidden, IDS, strict=True)])
    expected = read @ weights["head/kernel"] + weights["head/bias"]
    np.testing.assert_allclose(model(IDS).numpy(), expected, atol=2e-6)
    longer = np.pad(IDS, [(0, 0), (0, 4)])  # padding has no effect
    np.testing.assert_allclose(model(longer).numpy(), expected, atol=2e-6)
    assert not missing and ("encoder/pooler/dense/kernel" in weights) == (pooling == "pooler")


def test_reinitialized_layers(data, pretrained, vocabulary):
    config = make_config(data, pretrained, model__pooling="pooler")
    model, _ = filled(config, vocabulary)
    before = {name: v.numpy() for name, v in named_weights(model).items()}
    reinitialize(model, 1, [], seed=4)
    after = {name: v.numpy() for name, v in named_weights(model).items()}
    for name in before:
        anew = "layer_1" in name or "pooler" in name
        assert (before[name] != after[name]).any() == anew, name
    kernel = after["encoder/stack/layer_1/intermediate/kernel"]
    assert 0.005 < kernel.std() < 0.03 and np.abs(kernel).max() <= 0.04 + 1e-7
    assert (after["encoder/stack/layer_1/LayerNorm/gamma"] == 1).all()
    assert not after["encoder/stack/layer_1/output/bias"].any()
    other, _ = filled(config, vocabulary)
    reinitialize(other, 1, [], seed=4)
    for name, variable in named_weights(other).items():
        np.testing.assert_array_equal(variable.numpy(), after[name])


def test_weights_are_dropped_by_pattern(data, pretrained, vocabulary):
    config = make_config(data, pretrained, model__weight_dropout=0.5)
    model, _ = filled(config, vocabulary)
    assert list(named_weights(model)) == list(named_weights(classifier_of(model)))
    effective = model.effective_weights(0)
    assert len(effective) == 12 and all(name.endswith("kernel") for name in effective)
    assert {name.rpartition("layer_")[2][0] for name in effective} == {"0", "1"}
    kernel = next(iter(effective.values())).numpy()
    assert 0.2 < (kernel == 0).mean() < 0.8
    config.model.whole_inputs = True
    model, _ = filled(config, vocabulary)
    for kernel in model.effective_weights(0).values():
        zero = kernel.numpy() == 0
        assert (zero == zero[:, :1]).all() and 0 < zero.mean() < 1
    config.model.regularized = "no_such/kernel"
    with pytest.raises(UserError, match=r"model\.regularized=no_such/kernel"):
        make_model(config, vocabulary)


def test_parametrization_of_the_options(data, pretrained):
    options = make_config(data, pretrained).model
    assert parametrization(options) is None
    options.weight_dropout = 0.25
    assert parametrization(options).rate == 0.25
    options.update({"noise": 0.1, "noise_scale": "absolute"})
    noise, dropout = parametrization(options).parametrizations
    assert (noise.stddev, noise.scale, dropout.rate) == (0.1, "absolute", 0.25)
    options.update({"weight_dropout": 0.0, "mixout": 0.75, "noise_scale": "deviation"})
    noise, mixout = parametrization(options).parametrizations
    assert (noise.stddev, noise.scale, mixout.rate) == (0.1, "deviation", 0.75)
    assert isinstance(mixout, P.Mixout) and mixout.towards == "start"


def test_dropout_is_a_function_of_seed_and_call():
    x = tf.ones([100, 50])
    one, other = Dropout(0.25, seed=3), Dropout(0.25, seed=3)
    first, second = one(x, training=True), one(x, training=True)
    assert (first.numpy() != second.numpy()).any()
    other(x, training=True)
    np.testing.assert_array_equal(other(x, training=True), second)
    kept = (first.numpy() != 0).mean()
    assert abs(kept - 0.75) < 5 * np.sqrt(0.75 * 0.25 / 5000)
    np.testing.assert_allclose(first.numpy()[first.numpy() != 0], 1 / 0.75, rtol=1e-6)
    assert one(x) is x and one(x, training=False) is x


def test_batches():
    texts = [np.arange(1, n + 1, dtype=np.int32) for n in (3, 17, 5)]
    batch = batches.pad(texts, 0, 100)
    assert batch.shape == (3, 32) and batch.dtype == np.int32
    for row, text in zip(batch, texts, strict=True):
        np.testing.assert_array_equal(row[: len(text)], text)
        assert not row[len(text) :].any()
    lengths = {batches.padded_length(n, 512) for n in range(1, 513)}
    assert len(lengths) == 12 and max(lengths) == 512
    assert all(batches.padded_length(n, 512) >= n for n in range(1, 513))
    assert sorted(batches.order(9, 1, 2)) == list(range(9))
    assert (batches.order(9, 1, 2) == batches.order(9, 1, 2)).all()
    assert (batches.order(9, 1, 2) != batches.order(9, 1, 3)).any()
    assert (batches.order(9, 1, 2) != batches.order(9, 2, 2)).any()
    together = [chunk.tolist() for chunk in batches.by_length(texts, 2)]
    assert together == [[1, 2], [0]]


def test_every_weight_has_one_name(data, pretrained, vocabulary):
    model = make_model(make_config(data, pretrained, model__pooling="pooler"), vocabulary)
    named = named_weights(model)
    assert {id(v) for v in named.values()} == {id(v) for v in model.weights}
    assert len(named) == len(model.weights) == 41
    layers = {_keras.variables.path(v).split("/")[0] for v in model.weights}
    assert layers == {"encoder", "classifier"}


@pytest.mark.slow
def test_recomputed_calls_draw_the_same(data, pretrained, vocabulary):
    """Checks that losses and gradients equal those without recomputation.

    Masks on activations are on too.
    """
    config = make_config(data, pretrained, model__weight_dropout=0.4)
    config.model.update({"dropout": 0.3, "attention_dropout": 0.3, "head_dropout": 0.3})
    found = []
    for recompute in (True, False):
        config.model.recompute = recompute
        model, _ = filled(config, vocabulary)
        variables = [_keras.variables.tf_variable(v) for v in model.trainable_variables]

        @tf.function
        def step(model=model, variables=variables):
            with tf.GradientTape() as tape:
                logits = model(IDS, training=True)
                loss = tf.reduce_sum(tf.nn.log_softmax(10 * logits)[:, 0])
            return [loss, *map(tf.convert_to_tensor, tape.gradient(loss, variables))]

        steps = [[part.numpy() for part in step()] for _ in range(2)]
        assert steps[0][0] != steps[1][0]
        assert classifier_of(model).dropped.draws.calls == 2
        found.append([part for one in steps for part in one])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
