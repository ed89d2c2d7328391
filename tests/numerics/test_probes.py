"""`Probes` in custom loops: their findings, and the state that they must not change."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from planted_nan_models import TRIGGERS, VALUES, Plant, counts
from replicas import two_replicas
from stack_marks import extended, quick_rows
from tables_by_make_target import with_slow_rest

from tfwd.layers import transformer as T
from tfwd.numerics import Probes

layers = keras.layers
MODES = {"eager": None, "graph": {"jit_compile": False}, "xla": {"jit_compile": True}}


def make(*planted, name="middle"):
    keras.utils.set_random_seed(5)
    inner = [layers.Dense(5, activation="tanh", name="first"), *planted]
    inputs = layers.Input((6,))
    encoder = keras.Sequential([layers.Input((6,)), *inner], name="encoder")
    outputs = layers.Dense(1, name="last")(layers.Dropout(0.2, seed=1)(encoder(inputs)))
    return keras.Model(inputs, outputs)


def batch(trigger=None):
    x = np.random.default_rng(2).normal(size=(8, 6)).astype("float32")
    if trigger is not None:
        x[0, 0] = trigger
    return tf.constant(x), tf.constant(x[:, :1] * 0.5)


def trained(model, mode, probes=None, around=False, optimizer=None):
    """Returns a step of a training loop, in one of the modes."""
    optimizer = optimizer or keras.optimizers.Adam(0.01)

    def plain(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def watched(x, y):
        with probes:
            return plain(x, y)

    step = plain if probes is None or around else watched
    if MODES[mode] is not None:
        step = tf.function(step, **MODES[mode])
    return watched_around(step, probes) if around else step


def watched_around(step, probes):
    def run(x, y):
        with probes:
            return step(x, y)

    return run


class Still:
    """An optimizer that changes nothing, even for NaN in gradients."""

    def apply_gradients(self, pairs):
        """Does nothing with the gradients."""
        assert all(gradient is not None for gradient, _ in pairs)


PLANTED = [f"{way}, {mode}" for way in ("forward", "backward") for mode in MODES]


@pytest.mark.parametrize("case", with_slow_rest(PLANTED, {"forward, graph", "backward, graph"}))
def test_finds_planted_values(case):
    direction, mode = case.split(", ")
    planted = Plant(direction=direction, place=(1, 2), name="planted")
    model = make(planted, layers.Activation("linear", name="behind"))
    # `Plant` looks for the trigger in the output of a tanh.
    first = model.get_layer("encoder").get_layer("first")
    first.activation = keras.activations.linear
    first.set_weights([np.eye(6, 5), np.zeros(5)])
    probes = Probes(model)
    step = trained(model, mode, probes, optimizer=Still())
    at = "encoder/planted" if direction == "forward" else "encoder/first"
    kind = "output" if direction == "forward" else "gradient"
    for i, (value, trigger) in enumerate(TRIGGERS.items()):
        step(*batch())
        assert probes.report().first is None
        step(*batch(trigger))
        report = probes.report()
        (first,) = [one for one in report.found if (one.frame.kind, one.frame.name) == (kind, at)]
        assert report.first is first
        summary = first.detail.summary
        found = summary.nan, summary.positive_inf, summary.negative_inf
        assert found == counts(VALUES[value])
        assert summary.size == 40
        assert report.step == 2 * i + 2
        assert report.sentence.startswith(f"layer 'encoder/planted': {direction}")
        assert f"'{at}'" in report.sentence  # in backward, the gradient of its output is not finite


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
def test_numbers_equal_numpy(mode):
    model = make()
    probes = Probes(model)
    step = trained(model, mode, probes)
    x, y = batch()
    weights = {v.path if hasattr(v, "path") else v.name[:-2]: v.numpy() for v in model.weights}
    loss = step(x, y)
    found = {(one.frame.kind, one.frame.name): one.detail.summary for one in probes.report().found}
    first = np.tanh(x.numpy() @ model_value(weights, "first/kernel"))
    output = found["output", "encoder/first"]
    np.testing.assert_allclose(output.abs_max, abs(first).max(), rtol=1e-5)
    np.testing.assert_allclose(output.abs_min, abs(first).min(), rtol=1e-4)
    np.testing.assert_allclose(found["loss", "loss"].abs_max, loss, rtol=1e-6)
    kernel = next(s for (kind, name), s in found.items() if kind == "weight" and "first/k" in name)
    assert kernel.abs_max == abs(model_value(weights, "first/kernel")).max()
    bias = next(s for (kind, name), s in found.items() if kind == "weight" and "first/b" in name)
    assert (bias.zeros, bias.abs_max, bias.abs_min) == (5, 0.0, 0.0)
    gradients = [name for kind, name in found if kind == "weight gradient"]
    assert len(gradients) == len(model.trainable_variables)


def model_value(weights, name):
    (value,) = [value for path, value in weights.items() if path.endswith(name)]
    return value


@quick_rows("graph")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_training_is_the_same_to_the_bit(mode):
    results = []
    for look in (False, True):
        model = make()
        step = trained(model, mode, Probes(model, every_n_steps=2) if look else None)
        losses = [float(step(*batch())) for _ in range(4)]
        results.append([losses, *[v.numpy() for v in model.weights]])
    for plain, watched in zip(*results, strict=True):
        np.testing.assert_array_equal(watched, plain)


@quick_rows("eager")
@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph", "eager"}))
def test_every(mode):
    model = make()
    probes = Probes(model, every_n_steps=3)
    step = trained(model, mode, probes)
    steps = []
    for _ in range(5):
        step(*batch())
        steps.append(probes.report().step)
    assert steps == [1, 1, 1, 4, 4]


@extended
@pytest.mark.parametrize("mode", with_slow_rest(["graph", "xla"], {"graph"}))
def test_around_the_call_of_a_function(mode):
    model = make()
    probes = Probes(model)
    step = trained(model, mode, probes, around=True)
    for _ in range(2):
        step(*batch())
    report = probes.report()
    assert (report.step, report.first) == (2, None)
    assert {one.frame.kind for one in report.found} >= {"weight", "output", "gradient", "loss"}


@extended
def test_the_trace_that_ran_last():
    model = make()
    probes = Probes(model, weights=False)
    step = trained(model, "graph", probes)
    x, y = batch()
    step(x, y)
    step(x[:3], y[:3])
    assert probes.report().found[0].detail.summary.size == 3 * 6
    step(x, y)
    assert probes.report().found[0].detail.summary.size == 8 * 6


@extended
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"include": "first"}, {"encoder/first"}),
        ({"include": "encoder/.*", "gradients": False}, {"encoder/first", "encoder/behind"}),
        ({"exclude": "encoder/.*", "gradients": False}, {"encoder", "dropout", "last"}),
        ({"inputs": False, "outputs": False, "include": "last"}, {"last"}),
    ],
)
def test_chosen_layers(given, wanted):
    model = make(layers.Activation("tanh", name="behind"))
    probes = Probes(model, weights=False, **given)
    trained(model, "graph", probes)(*batch())
    names = {one.frame.name for one in probes.report().found if one.frame.kind != "loss"}
    assert {name.partition("_")[0] for name in names} == wanted


@extended
def test_replicas():
    strategy = two_replicas()
    with strategy.scope():
        model = make()
    probes = Probes(model)

    def on_replica(x):
        with probes:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x))
            return tape.gradient(loss, model.trainable_variables)[0]

    @tf.function
    def step(x):
        return strategy.run(on_replica, args=(x,))

    x = batch()[0].numpy()
    x[6, 1] = np.nan
    data = tf.data.Dataset.from_tensor_slices(x).batch(8)
    for one in strategy.experimental_distribute_dataset(data):
        step(one)
    report = probes.report()
    assert (report.replica, report.step) == (1, 1)
    assert (report.first.frame.kind, report.first.detail.summary.nan) == ("input", 1)


def test_leaves_nothing():
    model = make()
    before = [dict(vars(layer)) for layer in model._flatten_layers()]
    calls = [type(layer).call for layer in model._flatten_layers()]
    probes = Probes(model)
    step = trained(model, "graph", probes)
    step(*batch())
    assert [type(layer).call for layer in model._flatten_layers()] == calls
    for layer, had in zip(model._flatten_layers(), before, strict=True):
        assert set(vars(layer)) - {"_called"} == set(had) - {"_called"}
    steps = probes.report().step
    model(batch()[0], training=True)  # not in `with`
    assert probes.report().step == steps


def test_gradients_that_are_taken_outside_are_reported():
    model = make()
    probes = Probes(model)
    x, y = batch()
    with tf.GradientTape() as tape, probes:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    tape.gradient(loss, model.trainable_variables)
    assert "No gradient was checked" in str(probes.report())


@extended
def test_errors():
    model = make()
    with pytest.raises(TypeError, match="model='model': give a Keras model or layer"):
        Probes("model")
    for every in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="every_n_steps=.*whole number of at least 1"):
            Probes(model, every_n_steps=every)
    with pytest.raises(ValueError, match="is not built"):
        Probes(keras.Sequential([layers.Dense(1)]))
    with pytest.raises(ValueError, match="inputs, outputs, weights, gradients are all False"):
        Probes(model, inputs=False, outputs=False, weights=False, gradients=False)
    with pytest.raises(
        ValueError, match="include='frist' matches no layer and no weight.*encoder/first"
    ):
        Probes(model, include="frist")
    with pytest.raises(ValueError, match=r"exclude='\(' is not a regular expression"):
        Probes(model, exclude="(")
    probes = Probes(model)
    with pytest.raises(RuntimeError, match="no step was checked"):
        probes.report()
    step = trained(model, "graph")
    step(*batch())  # traced before
    with probes:
        step(*batch())
    with pytest.raises(RuntimeError, match="no step was checked"):
        probes.report()
    with probes, pytest.raises(RuntimeError, match="already open"):
        probes.__enter__()


@extended
def test_arguments_that_a_layer_refuses():
    """XLA drops the layer's error; a length and ids, in a function for batches of any length."""
    embeddings = T.Embeddings(9, 4, max_length=6, name="embeddings")
    embeddings(tf.zeros([1, 2], tf.int32))
    probes = Probes(embeddings, weights=False)

    @tf.function(jit_compile=True, input_signature=[tf.TensorSpec([None, None], tf.int32)])
    def run(ids):
        with probes:
            return embeddings(ids)

    name = "layer 'embeddings'"
    for ids, said in (
        (np.ones((2, 6)), None),
        (np.ones((2, 7)), f"{name} has positions for 6 tokens, and the call has 7, step 2"),
        ([[0, 9, 1], [-4, 3, 2]], f"{name}: ids must be from 0 to 8, and the call has -4 to 9, st"),
    ):
        result = run(tf.constant(ids, tf.int32)).numpy()
        report = probes.report()
        assert np.isnan(result).all() == (said is not None)
        if said is None:
            assert report.first is None
            assert {one.frame.kind for one in report.found} == {"input", "output"}
        else:
            assert report.sentence.startswith(said)
            assert [cause.name for cause in report.causes] == ["an argument that a layer refuses"]


def test_probes_of_two_models():
    """Checks that the second probes are an error, because only one can measure."""
    models = [keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]) for _ in range(2)]
    first, second = map(Probes, models)
    message = "are open in this thread, and only one can measure"
    with pytest.raises(RuntimeError, match=message), first, second:
        pass
    with second:
        models[1](tf.ones((2, 3)))
    assert second.report().first is None


def test_an_input_of_the_model_that_is_infinite():
    """Checks the cause: `Probes` do not know the batch, but no layer ran before."""
    model = make()
    x, y = batch(np.inf)
    probes = Probes(model)
    trained(model, "eager", probes)(x, y)
    (cause,) = probes.report().causes
    assert cause.name == "NaN or infinity in the input"
    assert "'encoder', takes" in cause.evidence
    assert "2.08 %" in cause.evidence  # one of 48 elements
