"""The model: its arithmetic against NumPy, its switches, its draws, its weights."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfwd import _keras, layers
from tfwd.lm.config import KEYS
from tfwd.lm.model import LanguageModel
from tfwd.runs.settings.validators import RATE
from tfwd.runs.training.layer_seeds import layer_seeds

IDS = tf.constant([[1, 2, 3, 1, 0, 4], [5, 6, 2, 2, 1, 3]], tf.int32)
ALL = {
    "weight_dropout": 0.5,
    "variational_noise": 0.1,
    "embedding_dropout": 0.2,
    "input_dropout": 0.3,
    "hidden_dropout": 0.25,
    "output_dropout": 0.4,
}


def make(**options):
    return LanguageModel(7, 4, (6, 4), **{"seed": 3, **options})


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def numpy_logits(model, ids):
    """Returns the plain model's logits in NumPy: gates are input, forget, candidate, output."""
    embeddings = model.embedding.embeddings.numpy()
    values = embeddings[ids]
    for lstm in model.lstms:
        kernel, recurrent, bias = (np.asarray(w) for w in lstm.get_weights())
        units = recurrent.shape[0]
        h = c = np.zeros((len(ids), units))
        outputs = []
        for t in range(ids.shape[1]):
            i, f, g, o = np.split(values[:, t] @ kernel + h @ recurrent + bias, 4, axis=1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            outputs.append(h)
        values = np.stack(outputs, axis=1)
    return values @ embeddings.T + model.decoder.bias.numpy()


def kinds(model):
    return {type(layer) for layer in model._flatten_layers(include_self=False)}


def operations(model):
    function = tf.function(lambda ids: model(ids, training=True).logits)
    graph = function.get_concrete_function(IDS).graph
    found = [op.type for op in graph.get_operations()]
    for inner in graph._functions.values() if hasattr(graph, "_functions") else ():
        found += [node.op for node in inner.cached_definition.node_def]
    return found


def test_arithmetic_is_the_papers():
    model = make()
    model.decoder.bias.assign(np.linspace(-1, 1, 7))
    logits = model(IDS, training=False).logits
    np.testing.assert_allclose(logits, numpy_logits(model, IDS.numpy()), atol=1e-6)


def test_switches_that_are_off_leave_no_layer():
    model = make()
    assert kinds(model) == {
        keras.layers.Embedding,
        keras.layers.LSTM,
        keras.layers.LSTMCell,
        layers.TiedDense,
    }
    names = operations(model)
    assert len(names) > 20
    loops = {"StatelessIf", "StatelessWhile"}
    assert not [n for n in names if "Random" in n or ("Stateless" in n and n not in loops)]
    np.testing.assert_array_equal(
        model(IDS, training=True).logits, model(IDS, training=False).logits
    )


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"weight_dropout": 0.5}, layers.WeightDropLSTM),
        ({"variational_noise": 0.1}, layers.Parametrized),
        ({"embedding_dropout": 0.5}, layers.DropoutEmbedding),
        ({"input_dropout": 0.5}, layers.LockedDropout),
        ({"hidden_dropout": 0.5}, layers.LockedDropout),
        ({"output_dropout": 0.5}, layers.LockedDropout),
    ],
)
def test_each_switch_acts_in_training_alone(options, kind):
    model, plain = make(**options), make()
    added = kinds(model) - kinds(plain)
    assert [k for k in added if k.__name__ in layers.__all__] == [kind]
    first, second = model(IDS, training=True).logits, model(IDS, training=True).logits
    assert np.abs(first - second).max() > 1e-6
    evaluated = model(IDS, training=False).logits
    np.testing.assert_array_equal(evaluated, plain(IDS, training=False).logits)


def test_dropped_recurrent_weights_leave_the_first_step_alone():
    model = make(weight_dropout=0.5, variational_noise=0.2)
    first, second = model(IDS, training=True).raw, model(IDS, training=True).raw
    np.testing.assert_array_equal(first[:, 0], second[:, 0])
    assert np.abs(first - second)[:, 1:].max() > 1e-6


def test_noise_comes_before_dropout():
    model = make(weight_dropout=0.5, variational_noise=0.2)
    model(IDS, training=True)
    for wrapper in model.lstms:
        ((name, effective),) = wrapper.effective_weights(0).items()
        assert "recurrent_kernel" in name
        raw = wrapper.layer.cell.recurrent_kernel.numpy()
        kept = effective.numpy() != 0
        assert abs(kept.mean() - 0.5) < 5 * 0.5 / np.sqrt(kept.size)
        noise = effective.numpy()[kept] / 2 - raw[kept]
        assert abs(noise.std() - 0.2) < 5 * 0.2 / np.sqrt(2 * kept.sum())


def test_noise_begins_at_its_step():
    model = make(variational_noise=0.2, noise_start_step=1)
    plain = make()(IDS, training=False).raw
    # Training and evaluation take different loops, equal to rounding.
    np.testing.assert_allclose(model(IDS, training=True).raw, plain, atol=1e-6)
    assert np.abs(model(IDS, training=True).raw - plain).max() > 1e-3


def test_output_dropout_has_one_mask_for_all_steps():
    output = make(output_dropout=0.4)(IDS, training=True)
    ratio = output.dropped.numpy() / output.raw.numpy()
    np.testing.assert_allclose(ratio, np.broadcast_to(ratio[:, :1], ratio.shape), rtol=1e-5)
    values = np.unique(ratio.round(4))
    np.testing.assert_allclose(values, [0, 1 / 0.6], atol=1e-3)


def test_states_carry_the_text_on():
    model = make(weight_dropout=0.5)
    whole = model(IDS, training=False)
    first = model(IDS[:, :2], training=False)
    second = model(IDS[:, 2:], states=first.states, training=False)
    np.testing.assert_allclose(whole.logits[:, 2:], second.logits, atol=1e-6)
    for pair, other in zip(whole.states, second.states, strict=True):
        for state, same in zip(pair, other, strict=True):
            np.testing.assert_allclose(state, same, atol=1e-6)
    assert [[tuple(s.shape) for s in pair] for pair in model.zero_state(2)] == [
        [tuple(s.shape) for s in pair] for pair in whole.states
    ]


def test_weights_begin_as_published():
    model = LanguageModel(500, 100, (100, 100), seed=1, tie_weights=False)
    limits = {"embeddings": 0.1, "decoder/kernel": 0.1, "lstm": 0.1}
    for variable in model.trainable_variables:
        values = variable.numpy()
        if _keras.variables.path(variable).endswith("decoder/bias"):
            assert not values.any()
            continue
        (limit,) = (limits[name] for name in limits if name in _keras.variables.path(variable))
        assert np.abs(values).max() <= limit
        error = limit / np.sqrt(3) * 5 / np.sqrt(values.size)
        assert abs(values.mean()) < error
        assert abs(values.std() - limit / np.sqrt(3)) < error
    flat = [tuple(v.numpy().ravel()[:20]) for v in model.trainable_variables]
    assert len(set(flat)) == len(flat)


def test_a_seed_fixes_weights_and_draws():
    same, again, other = (make(seed=seed, **ALL) for seed in (5, 5, 6))
    for _ in range(2):
        first = same(IDS, training=True).logits
        np.testing.assert_array_equal(first, again(IDS, training=True).logits)
        assert np.abs(first - other(IDS, training=True).logits).max() > 1e-6
    keras.utils.set_random_seed(1)
    first = make(seed=None).get_weights()
    keras.utils.set_random_seed(1)
    for weight, same_weight in zip(first, make(seed=None).get_weights(), strict=True):
        np.testing.assert_array_equal(weight, same_weight)


def seeds_of_parts(model):
    """Returns the seeds in the order of the parts; None for a draw that is off."""
    yield model.embedding.embeddings_initializer.seed
    yield getattr(model.embedding, "seed", None)
    yield getattr(model.input_dropout, "seed", None)
    for number, lstm in enumerate(model.lstms, 1):
        cell = getattr(lstm, "layer", lstm).cell
        for name in ("kernel", "recurrent", "bias"):
            yield getattr(cell, f"{name}_initializer").seed
        yield None if type(lstm) is keras.layers.LSTM else lstm.seed
        if number < len(model.lstms):
            yield getattr(getattr(model, f"hidden_dropout_{number}"), "seed", None)
    yield getattr(model.output_dropout, "seed", None)
    yield model.decoder.kernel_initializer.seed


@pytest.mark.parametrize("options", [{}, ALL], ids=["off", "on"])
def test_each_part_has_its_place_in_the_row_of_seeds(options):
    """Checks the order of the seeds: one more seed for a part would change all parts after it."""
    row = list(itertools.islice(layer_seeds(3), 14))
    assert row[:3] == [1742692731, 183930186, 385346043]
    found = list(seeds_of_parts(make(tie_weights=False, **options)))
    for seed, of_row in zip(found, row, strict=True):
        assert seed in (of_row, None)
    assert (None in found) == (not options)


def test_a_checkpoint_holds_every_variable_and_the_place_in_the_draws(tmp_path):
    model, other = make(seed=1, **ALL), make(seed=2, **ALL)
    for _ in range(3):
        model(IDS, training=True)
    tf.train.Checkpoint(model=model).write(str(tmp_path / "tensors"))
    saved = tf.train.list_variables(str(tmp_path / "tensors"))
    assert len(saved) - 1 >= len(model.trainable_variables) + 6  # and six layers that draw
    tf.train.Checkpoint(model=other).read(str(tmp_path / "tensors")).assert_consumed()
    for variable, copy in zip(model.trainable_variables, other.trainable_variables, strict=True):
        np.testing.assert_array_equal(variable, copy)
    for _ in range(2):
        drawn = model(IDS, training=True).logits
        np.testing.assert_array_equal(drawn, other(IDS, training=True).logits)


def test_config_makes_the_same_model():
    model = make(**ALL, tie_weights=False, recompute=False, dtype_policy="mixed_bfloat16")
    copy = LanguageModel.from_config(model.get_config())
    assert copy.get_config() == model.get_config()
    for weight, same in zip(model.get_weights(), copy.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, same)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float64"])
def test_dtype_policies(policy):
    model = make(dtype_policy=policy, **ALL)
    output = model(IDS, states=model.zero_state(2), training=True)
    assert output.logits.dtype == ("float64" if policy == "float64" else "float32")
    assert {state.dtype for pair in output.states for state in pair} == {
        tf.as_dtype(model.compute_dtype)
    }
    plain, other = make(), make(dtype_policy=policy)
    other.set_weights(plain.get_weights())
    tolerance = 1e-6 if policy == "float64" else 1e-2
    logits, reference = (m(IDS, training=False).logits for m in (other, plain))
    np.testing.assert_allclose(logits, reference, atol=tolerance)


def test_errors():
    with pytest.raises(ValueError, match=r"hidden_units=\(6, 5\).*embedding_dim=4"):
        LanguageModel(7, 4, (6, 5))
    with pytest.raises(ValueError, match="at least one LSTM"):
        LanguageModel(7, 4, ())
    for name in ALL:
        if KEYS[f"model.{name}"].validator is RATE:
            with pytest.raises(ValueError, match=r"1\.0"):
                make(**{name: 1.0})
