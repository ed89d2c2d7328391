"""`predict_samples` against plain Keras models whose weights are set by hand for each draw."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf
from model_kinds import ALL, X
from stacks import IS_KERAS_2, needs_keras3

import tfwd
from tfwd import layers
from tfwd import parametrizations as P
from tfwd.monte_carlo import prediction

PERTURBED = {"kernel": P.Dropout(0.5), "all": P.GaussianNoise(0.3)}


def predicted(model: keras.Layer, x, n: int, *args, **options) -> tfwd.monte_carlo.PredictedSamples:
    return tfwd.predict_samples(model, x, n, *args, **{"verbose": 0, **options})


def wrappers(model: keras.Layer) -> list:
    inside = model._flatten_layers()
    return [x for x in inside if hasattr(x, "effective_weights")]


def by_hand(model: keras.Layer, plain: keras.Model, x, n: int) -> list[np.ndarray]:
    """Returns the outputs of the plain model on the weights of the next training calls.

    Args:
        model: model that draws. No layer may have two calls.
        plain: model on the same variables as `model`, without tfwd.
        x: inputs.
        n: number of samples.
    """
    raw = plain.get_weights()
    found = []
    for sample in range(n):
        values = [wrapper.effective_weights(wrapper.calls + sample) for wrapper in wrappers(model)]
        for wrapper, effective in zip(wrappers(model), values, strict=True):
            if isinstance(wrapper, keras.Model):  # the layer inside it has the same weights
                continue
            inner = getattr(wrapper, "layer", wrapper)
            # Names are unique ends of paths, in the order of the weights.
            left = list(effective.items())
            for variable in inner.weights:
                if left and variable.shape == left[0][1].shape and _fits(variable, left[0][0]):
                    variable.assign(left.pop(0)[1])
            assert not left
        found.append([np.asarray(y) for y in tf.nest.flatten(plain(x, training=False))])
        plain.set_weights(raw)
    return [np.stack(each) for each in zip(*found, strict=True)]


def _fits(variable, name: str) -> bool:
    return variable.name.partition(":")[0].rpartition("/")[2] == name.rpartition("/")[2]


def check_moments(result, samples: list[np.ndarray], rtol: float = 1e-5) -> None:
    """Checks mean, deviation and samples against samples that were computed by hand."""
    means, deviations = tf.nest.flatten(result.mean), tf.nest.flatten(result.stddev)
    for mean, deviation, found, expected in zip(
        means, deviations, tf.nest.flatten(result.samples), samples, strict=True
    ):
        assert found.shape == expected.shape and np.ptp(found, axis=0).max() > 0.01
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)
        np.testing.assert_allclose(mean, expected.mean(0), rtol=rtol, atol=rtol)
        np.testing.assert_allclose(deviation, expected.std(0), rtol=10 * rtol, atol=rtol)


@pytest.mark.parametrize("kind", ["sequential", "nested", "subclassed"])
def test_samples_equal_a_loop_over_effective_weights(kind: str, size: str) -> None:
    plain = ALL[kind]()
    model = tfwd.parametrize(plain, PERTURBED, seed=3)
    model(X, training=True)  # the first sample is not call 0
    expected = by_hand(model, plain, X, 4)
    for batch_size in (None, 3):
        result = predicted(model, X.numpy(), 4, batch_size, return_samples=True)
        check_moments(result, expected)
    assert {int(wrapper.calls) for wrapper in wrappers(model)} == {1}


def recurrent() -> keras.Sequential:
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            layers.DropoutEmbedding(10, 4, 0.25, mask_zero=True, seed=1),
            layers.WeightDropLSTM(4, return_sequences=True, seed=2),
            keras.layers.Bidirectional(layers.WeightDropLSTM(5, seed=3)),
            layers.WeightDropout(
                layers.VariationalNoise(keras.layers.Dense(3), 0.5, "all", seed=4), 0.5, seed=5
            ),
        ]
    )


def test_tfwds_layers_and_nested_wrappers_draw() -> None:
    ids = np.asarray([[1, 2, 3, 0], [4, 5, 9, 7], [2, 2, 0, 0]], "int32")
    model = recurrent()
    samples = predicted(model, ids, 3, 2, return_samples=True).samples
    embedding, lstm, both, dense = model.layers
    directions = [both.forward_layer, both.backward_layer]
    plain = tfwd.unwrap(model)  # plain Keras layers
    for sample in range(3):
        layers_and_weights = [
            (embedding, "embeddings"),
            (lstm, "recurrent_kernel"),
            *((direction, "recurrent_kernel") for direction in directions),
        ]
        drawn = [layer.effective_weights(sample)[name] for layer, name in layers_and_weights]
        # The inner wrapper's noise comes first, then the outer wrapper's dropout of the kernel.
        drawn += [*dense.layer.effective_weights(sample).values()]
        kernel = dense.effective_weights(sample)["kernel"]
        targets = [embedding.embeddings, lstm.cell.recurrent_kernel]
        targets += [direction.cell.recurrent_kernel for direction in directions]
        targets += [dense.layer.layer.kernel, dense.layer.layer.bias]
        raw = plain.get_weights()
        drawn[-2] = kernel
        for variable, value in zip(targets, drawn, strict=True):
            variable.assign(value)
        expected = np.asarray(plain(ids))
        plain.set_weights(raw)
        np.testing.assert_allclose(samples[sample], expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(samples[0], samples[1])


def test_a_layer_that_is_called_twice_draws_twice_for_each_sample() -> None:
    inputs = keras.Input((3,))
    shared = keras.layers.Dense(3, use_bias=False)
    model = tfwd.parametrize(
        keras.Model(inputs, shared(shared(inputs))), {"kernel": P.Dropout(0.5)}, seed=1
    )
    x = np.asarray(X[:5, :3])
    samples = predicted(model, x, 3, batch_size=2, return_samples=True).samples
    (wrapper,) = wrappers(model)
    for sample in range(3):
        one, two = (wrapper.effective_weights(2 * sample + k)["kernel"] for k in range(2))
        assert not np.array_equal(one, two)
        np.testing.assert_allclose(samples[sample], x @ one @ two, rtol=1e-5, atol=1e-6)


def test_other_uses_of_a_weight_read_the_raw_weight() -> None:
    embedding = keras.layers.Embedding(7, 4)
    inputs = keras.Input((), dtype="int32")
    hidden = layers.WeightDropout(embedding, 0.5, seed=1, name="dropped")(inputs)
    model = keras.Model(inputs, layers.TiedDense(embedding, use_bias=False)(hidden))
    ids = np.arange(7, dtype="int32")
    samples = predicted(model, ids, 3, return_samples=True).samples
    raw = np.asarray(embedding.embeddings)
    for sample in range(3):
        drawn = model.get_layer("dropped").effective_weights(sample)["embeddings"]
        np.testing.assert_allclose(samples[sample], drawn @ raw.T, rtol=1e-5, atol=1e-6)


class Counting(keras.layers.Layer):
    """A layer that counts how often Python runs its call."""

    runs = 0

    def call(self, x):
        type(self).runs += 1
        return x


def counted_model() -> keras.Model:
    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(2)(Counting()(inputs))
    return tfwd.parametrize(keras.Model(inputs, outputs), {"kernel": P.Dropout(0.5)}, seed=1)


@pytest.mark.parametrize(("batch_size", "traces"), [(8, 1), (4, 1), (3, 2), (5, 2), (100, 1)])
def test_the_model_is_traced_once_for_each_shape(batch_size: int, traces: int) -> None:
    model = counted_model()
    Counting.runs = 0
    parts = predicted(model, X, 4, batch_size, return_samples=True)
    assert Counting.runs == traces
    whole = predicted(model, X, 4, return_samples=True)
    for one, two in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    assert parts.mean.shape == (8, 2) and parts.samples.shape == (4, 8, 2)


def test_a_second_call_traces_nothing_until_the_model_changes() -> None:
    model = counted_model()
    predicted(model, X, 2)
    Counting.runs = 0
    one = predicted(model, X, 3)
    model.layers[-1].layer.kernel.assign(tf.ones((6, 2)))
    two = predicted(model, X, 3)
    assert Counting.runs == 0
    assert np.abs(one.mean - two.mean).max() > 0.01
    kernels = [model.layers[-1].effective_weights(sample)["kernel"] for sample in range(3)]
    by_numpy = np.stack([X @ kernel for kernel in kernels])
    np.testing.assert_allclose(two.mean, by_numpy.mean(0), rtol=1e-5, atol=1e-6)
    predicted(model, X, 2, training=True)
    predicted(model, X, 2)
    assert Counting.runs == 2
    model.layers[-1].trainable = False
    predicted(model, X, 2)
    assert Counting.runs == 3


def test_a_model_is_freed_although_it_was_traced() -> None:
    def used() -> list[weakref.ref]:
        models = [counted_model(), tfwd.parametrize(ALL["subclassed"](), PERTURBED, seed=3)]
        for training in (False, True):
            for model in models:
                predicted(model, X, 2, training=training)
        return [weakref.ref(model) for model in models]

    held = used()
    tfwd.release_models()
    gc.collect()
    assert [one() for one in held] == [None, None]


def test_a_model_that_runs_eagerly_is_not_traced() -> None:
    model = counted_model()
    model.compile(run_eagerly=True)
    Counting.runs = 0
    found = predicted(model, X, 3, 4)
    assert Counting.runs == 6
    model.compile(run_eagerly=False)
    for one, two in zip(found[:2], predicted(model, X, 3)[:2], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


class Batches(keras.utils.PyDataset if not IS_KERAS_2 else keras.utils.Sequence):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int):
        rows = slice(3 * index, 3 * index + 3)
        return X[rows].numpy(), np.zeros((len(X[rows]), 2))


def test_kinds_of_inputs() -> None:
    model = tfwd.parametrize(ALL["sequential"](), PERTURBED, seed=3)
    expected = predicted(model, X.numpy(), 3)
    dataset = tf.data.Dataset.from_tensor_slices(X)
    pairs = tf.data.Dataset.from_tensor_slices((X, tf.zeros(8), tf.ones(8)))
    for x in (
        X,
        X.numpy().astype("float64"),
        dataset.batch(3),
        pairs.batch(4),
        dataset.filter(lambda row: True).batch(3),  # of unknown length
        Batches(),
    ):
        found = predicted(model, x, 3)
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.stddev, expected.stddev, rtol=1e-5, atol=1e-6)
        assert found.samples is None


@pytest.mark.parametrize("structure", ["list", "dict"])
def test_several_inputs_and_outputs(structure: str) -> None:
    inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((), dtype="int32", name="b")}
    one = keras.layers.Dense(3, name="one")(inputs["a"])
    two = keras.layers.Embedding(5, 3, name="two")(inputs["b"])
    outputs = {"sum": one + two, "one": one}
    plain = keras.Model(inputs if structure == "dict" else list(inputs.values()), outputs)
    model = tfwd.parametrize(plain, {"one/.*": P.GaussianNoise(0.5)}, seed=1)
    x = {"a": np.asarray(X[:, :2]), "b": np.arange(8, dtype="int32") % 5}
    x = x if structure == "dict" else list(x.values())
    found = predicted(model, x, 3, 5, return_samples=True)
    expected = by_hand(model, plain, x, 3)
    assert set(found.mean) == set(found.stddev) == set(found.samples) == {"sum", "one"}
    check_moments(found, expected)


def with_dropout() -> keras.Sequential:
    """Returns a model with dropout, whose masks have the state of a generator."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, name="first"),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(0.5, seed=7),
            keras.layers.Dense(2, name="second"),
        ]
    )


@pytest.mark.parametrize("training", [False, True])
def test_training_continues_as_if_nothing_had_been_predicted(training: bool) -> None:
    def trained(between: bool) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        plain = ALL["sequential"]() if IS_KERAS_2 and training else with_dropout()
        model = tfwd.parametrize(plain, {"kernel": P.Mixout(0.5)}, seed=3)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        states = []
        for _ in range(2):
            if between:
                before = [np.asarray(v) for v in model.variables]
                predicted(model, X, 3, 4, training=training)
                for old, new in zip(before, model.variables, strict=True):
                    np.testing.assert_array_equal(old, new)
            model.fit(X, tf.ones((8, 2)), batch_size=4, shuffle=False, verbose=0)
            states += model.get_weights()
        return states

    for one, two in zip(trained(False), trained(True), strict=True):
        np.testing.assert_array_equal(one, two)


def test_training_runs_dropout_and_leaves_statistics_alone() -> None:
    """Checks that every activation is dropped or scaled, after the moving statistics."""
    inputs = keras.Input((6,))
    norm = keras.layers.BatchNormalization(name="norm")
    hidden = keras.layers.Dense(6, name="dense")(inputs)
    hidden = keras.layers.Dropout(0.5)(norm(hidden))
    model = tfwd.parametrize(
        keras.Model(inputs, hidden), {"dense/kernel": P.GaussianNoise(0.5)}, seed=1
    )
    norm.moving_mean.assign(np.arange(6.0))
    norm.moving_variance.assign(np.full(6, 4.0))
    before = [np.asarray(w) for w in model.weights]
    n = 40
    plain, dropped = (
        predicted(model, X, n, return_samples=True, training=flag).samples for flag in (False, True)
    )
    (wrapper,) = wrappers(model)
    for sample in range(n):
        kernel = wrapper.effective_weights(sample)["kernel"]
        normal = (X @ kernel - np.arange(6.0)) / np.sqrt(4.0 + 1e-3)
        np.testing.assert_allclose(plain[sample], normal, rtol=1e-4, atol=1e-5)
        kept = dropped[sample] != 0
        np.testing.assert_allclose(dropped[sample][kept], 2 * normal[kept], rtol=1e-4, atol=1e-5)
    share = (dropped != 0).mean()
    assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(dropped.size)
    assert len({(dropped[s] != 0).tobytes() for s in range(n)}) == n  # each mask is another one
    for old, new in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(old, new)


def test_training_runs_locked_dropout() -> None:
    model = keras.Sequential(
        [
            keras.Input((3, 6)),
            layers.LockedDropout(0.5, seed=2),
            layers.VariationalNoise(keras.layers.Dense(4), 0.1, seed=1),
        ]
    )
    x = tf.ones((2, 3, 6))
    calls = [int(layer.draws.calls) for layer in model.layers]
    quiet, noisy = (predicted(model, x, 30, training=flag).stddev for flag in (False, True))
    assert quiet.mean() < 0.5 * noisy.mean()
    assert [int(layer.draws.calls) for layer in model.layers] == calls == [0, 0]


@needs_keras3("random state in its variables")
def test_the_generators_of_dropout_are_restored() -> None:
    model = tfwd.parametrize(with_dropout(), {"kernel": P.Dropout(0.5)}, seed=1)
    states = [np.asarray(v) for v in model.variables]
    one, two = (predicted(model, X, 3, 4, training=True, return_samples=True) for _ in range(2))
    np.testing.assert_array_equal(one.samples, two.samples)
    for old, new in zip(states, model.variables, strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_stateful_layer_keeps_its_state() -> None:
    lstm = keras.layers.LSTM(3, stateful=True)
    model = keras.Sequential(
        [keras.Input((4, 2), batch_size=2), layers.WeightDropout(lstm, 0.5, seed=1)]
    )
    x = np.asarray(X[:2, :2])[:, None].repeat(4, 1)
    model(x)
    states = [np.asarray(state) for state in lstm.states]
    assert np.abs(states[0]).max() > 0
    samples = predicted(model, x, 3, return_samples=True).samples
    for old, new in zip(states, lstm.states, strict=True):
        np.testing.assert_array_equal(old, new)
    (wrapper,) = wrappers(model)
    raw = np.asarray(lstm.cell.recurrent_kernel)
    for sample in range(3):
        lstm.cell.recurrent_kernel.assign(wrapper.effective_weights(sample)["recurrent_kernel"])
        expected = np.asarray(lstm(x))
        for state, value in zip(lstm.states, states, strict=True):
            state.assign(value)
        lstm.cell.recurrent_kernel.assign(raw)
        np.testing.assert_allclose(samples[sample], expected, rtol=1e-4, atol=1e-5)


class Statistic(keras.layers.Layer):
    """A layer that updates a weight in training, and reads it after the update."""

    def build(self, shape) -> None:
        self.seen = self.add_weight(
            name="seen", shape=(), initializer="zeros", trainable=False, dtype="float32"
        )

    def call(self, x, training=False):
        if training:
            self.seen.assign(self.seen + 1.0)
        return x + self.seen


def test_the_updates_of_a_users_layer_are_discarded() -> None:
    inputs = keras.Input((6,))
    statistic = Statistic()
    plain = keras.Model(inputs, statistic(keras.layers.Dense(2)(inputs)))
    model = tfwd.parametrize(plain, {"kernel": P.Dropout(0.5)}, seed=1)
    one, two = (predicted(model, X, 3, training=flag).mean for flag in (False, True))
    np.testing.assert_allclose(one + 1.0, two, rtol=1e-5, atol=1e-6)
    assert float(statistic.seen) == 0.0


def test_mixout_before_and_after_its_references_are_copied() -> None:
    plain = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    model = tfwd.parametrize(plain, {"kernel": P.Mixout(0.5)}, seed=1)
    (wrapper,) = wrappers(model)
    first = predicted(model, X, 3)
    np.testing.assert_array_equal(first.stddev, np.zeros((8, 2)))  # nothing has moved yet
    np.testing.assert_allclose(first.mean, plain(X), rtol=1e-5, atol=1e-6)
    plain.layers[0].kernel.assign(np.ones((6, 2)))
    model(X, training=True)  # takes its references only now
    plain.layers[0].kernel.assign(np.full((6, 2), 3.0))
    assert set(np.unique(wrapper.effective_weights(1)["kernel"])) == {1.0, 5.0}
    check_moments(predicted(model, X, 3, return_samples=True), by_hand(model, plain, X, 3))


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [("mixed_bfloat16", "bfloat16"), ("mixed_float16", "float16"), ("float64", "float64")],
)
def test_dtypes(policy: str, dtype: str) -> None:
    dense = keras.layers.Dense(2, dtype=policy)
    model = keras.Sequential([keras.Input((6,)), layers.WeightDropout(dense, 0.5, seed=1)])
    found = predicted(model, X, 5, return_samples=True)
    wide = "float64" if dtype == "float64" else "float32"
    assert [found.mean.dtype, found.stddev.dtype] == [wide, wide]
    assert found.samples.dtype.name == dtype
    exact = found.samples.astype("float64")
    np.testing.assert_allclose(found.mean, exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.stddev, exact.std(0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("return_samples", [False, True])
def test_outputs_are_kept_only_on_request(monkeypatch, return_samples: bool) -> None:
    """Counts the outputs that are alive whenever a sample is predicted."""
    model = tfwd.parametrize(ALL["sequential"](), PERTURBED, seed=3)
    made: list[weakref.ref] = []
    alive: list[int] = []
    own = prediction.dense

    def dense(output: tf.Tensor) -> np.ndarray:
        alive.append(sum(one() is not None for one in made))
        found = own(output).copy()
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(prediction, "dense", dense)
    predicted(model, X, 20, 4, return_samples=return_samples)
    assert len(made) == 40
    assert max(alive) >= 19 if return_samples else max(alive) <= 2


def test_sums_stay_exact_far_from_zero() -> None:
    inputs = keras.Input((6,))
    shifted = keras.layers.Dense(2, name="dense")(inputs) + 1000.0
    model = tfwd.parametrize(keras.Model(inputs, shifted), {"kernel": P.GaussianNoise(0.01)})
    found = predicted(model, X, 50, return_samples=True)
    np.testing.assert_allclose(
        found.stddev, found.samples.astype("float64").std(0), rtol=1e-4, atol=1e-7
    )


def test_whole_numbers_and_one_sample() -> None:
    class Chosen(keras.layers.Layer):
        def call(self, x):
            return tf.argmax(x, -1), x > 0

        def compute_output_shape(self, shape):
            return shape[:-1], shape

    inputs = keras.Input((6,))
    outputs = Chosen(dtype="float32")(keras.layers.Dense(3)(inputs))
    model = tfwd.parametrize(keras.Model(inputs, outputs), {"kernel": P.Dropout(0.5)}, seed=1)
    (mean, shares), _, (samples, signs) = predicted(model, X, 1, return_samples=True)
    assert (samples.dtype, signs.dtype, mean.dtype) == (np.int64, np.bool_, np.float32)
    np.testing.assert_array_equal(samples[0], mean)
    np.testing.assert_array_equal(signs[0], shares)
    assert predicted(model, X, 1).stddev[1].max() == 0.0


def test_a_rule_that_acts_in_evaluation_is_applied_too() -> None:
    given = {"kernel": P.Chain([P.GaussianNoise(0.5), P.WeightNorm()])}
    plain = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    model = tfwd.parametrize(plain, given, seed=1)
    check_moments(predicted(model, X, 3, return_samples=True), by_hand(model, plain, X, 3))


def test_several_threads_get_the_same_samples() -> None:
    model = tfwd.parametrize(ALL["sequential"](), PERTURBED, seed=3)
    expected = predicted(model, X, 10, 4).mean
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: predicted(model, X, 10, 4).mean, range(8)))
    for mean in found:
        np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-6)


def test_the_draws_depend_on_the_seed() -> None:
    plain = ALL["sequential"]()
    one, two, other = (
        predicted(tfwd.parametrize(plain, PERTURBED, seed=seed), X, 3).mean for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, two)
    assert np.abs(one - other).max() > 0.01


def test_a_rate_of_0_has_no_deviation_and_counts_calls() -> None:
    plain = ALL["sequential"]()
    model = tfwd.parametrize(plain, {"kernel": P.Dropout(0.0)}, seed=1)
    found = predicted(model, X, 3)
    np.testing.assert_array_equal(found.stddev, np.zeros((8, 2)))
    np.testing.assert_allclose(found.mean, plain(X), rtol=1e-5, atol=1e-6)


class Failing(keras.layers.Layer):
    def call(self, x, training=False):
        tf.debugging.assert_less(tf.reduce_max(x), 1000.0)
        return x


def test_an_error_leaves_the_model_as_it_was() -> None:
    inputs = keras.Input((6,))
    plain = keras.Model(inputs, Failing()(keras.layers.Dense(2)(inputs)))
    model = tfwd.parametrize(plain, {"kernel": P.Mixout(0.5)}, seed=1)
    before = [np.asarray(v) for v in model.variables]
    x = np.concatenate([X, np.full((8, 6), 1e9, "float32")])
    with pytest.raises(tf.errors.InvalidArgumentError):
        predicted(model, x, 3, 8)
    for old, new in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, new)
    (wrapper,) = wrappers(model)
    assert wrapper.calls == 0
    assert not any(bool(taken) for taken in wrapper.references.taken())


class PastKeras(keras.layers.Layer):
    """A layer that reads a weight in a way that no substitution can reach."""

    def build(self, shape) -> None:
        self.kernel = self.add_weight(name="kernel", shape=(6, 2))
        held = getattr(self.kernel, "value", None)
        self.past = lambda: held

    def call(self, x):
        return x @ tf.convert_to_tensor(self.past())


@needs_keras3("variable that is not a layer's attribute")
def test_a_weight_that_is_read_past_keras_is_an_error() -> None:
    layer = PastKeras(name="past")
    model = keras.Sequential([keras.Input((6,)), layers.WeightDropout(layer, 0.5)])
    with pytest.raises(ValueError, match="reads its weight 'kernel' without Keras"):
        predicted(model, X, 2)


def test_a_progress_bar_counts_samples(capsys: pytest.CaptureFixture[str]) -> None:
    model = tfwd.parametrize(ALL["sequential"](), PERTURBED, seed=3)
    for verbose in ("auto", 1, 2):
        predicted(model, X, 3, 4, verbose=verbose)
        assert "6/6" in capsys.readouterr().out
    unknown = tf.data.Dataset.from_tensor_slices(X).filter(lambda row: True).batch(4)
    predicted(model, unknown, 3, verbose=1)
    assert "6/" in capsys.readouterr().out
    predicted(model, X, 3, verbose=0)
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return tfwd.parametrize(ALL["sequential"](), PERTURBED, seed=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n=0: expected an integer of at least 1"),
        ({"n": 2.0}, "n=2.0: expected an integer"),
        ({"n": True}, "n=True: expected an integer"),
        ({"batch_size": 0}, "batch_size=0: expected an integer of at least 1"),
        ({"batch_size": "8"}, "batch_size='8': expected an integer"),
        ({"x": np.zeros((0, 6))}, "x has no examples"),
        ({"x": []}, "x is empty"),
        ({"x": [np.zeros((3, 6)), np.zeros((4, 6))]}, "3 and with 4 examples"),
        ({"x": np.float32(1.0)}, "has no axis of examples"),
        ({"x": tf.data.Dataset.from_tensor_slices(X).batch(4), "batch_size": 4},
         "batch_size=4: expected None, because a .*Dataset yields batches"),
        ({"x": tf.data.Dataset.from_tensor_slices(X).batch(4).repeat()}, "infinite .*take"),
        ({"x": tf.data.Dataset.from_tensor_slices(X[:0]).batch(4)}, "x has no batches"),
        ({"x": iter([X])}, "x is a list_iterator: expected arrays or a dataset"),
        ({"x": tf.sparse.from_dense(X)}, "x has a SparseTensor.*pass a dataset"),
        ({"verbose": 3}, "verbose=3: expected 0, 1, 2 or 'auto'"),
    ],
)  # fmt: skip
def test_wrong_arguments(model: keras.Model, arguments: dict, message: str) -> None:
    before = [np.asarray(v) for v in model.variables]
    with pytest.raises(ValueError, match=message):
        predicted(**{"model": model, "x": X, "n": 2, **arguments})
    for old, new in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ALL["sequential"](), "has no parametrized weights, so .*tfwd.parametrize"),
        (
            lambda: layers.Parametrized(keras.layers.Dense(2), P.WeightNorm()),
            "has no weights yet|only parametrizations that draw nothing",
        ),
        (lambda: layers.WeightDropout(keras.layers.Dense(2, name="d"), 0.5), "'d' has no weights"),
        (lambda: "model", "expected a Keras model, got 'model' of type str"),
    ],
)
def test_models_that_cannot_be_sampled(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predicted(make(), X, 2)


def test_a_deterministic_parametrization_alone_is_an_error() -> None:
    layer = layers.Parametrized(keras.layers.Dense(2), P.WeightNorm())
    layer.build((None, 6))
    with pytest.raises(ValueError, match="only parametrizations that draw nothing"):
        predicted(layer, X, 2)


def test_a_wrapped_layer_alone() -> None:
    layer = layers.WeightDropout(keras.layers.Dense(2), 0.5, seed=1)
    layer.build((None, 6))
    found = predicted(layer, X, 3, return_samples=True).samples
    for sample in range(3):
        kernel = layer.effective_weights(sample)["kernel"]
        np.testing.assert_allclose(found[sample], X @ kernel, rtol=1e-5, atol=1e-6)


def test_outputs_that_have_no_moments() -> None:
    class Odd(keras.layers.Layer):
        kind = "ragged"

        def call(self, x):
            kinds = {
                "ragged": lambda: tf.RaggedTensor.from_tensor(x),
                "text": lambda: tf.strings.as_string(x),
                "scalar": lambda: tf.reduce_sum(x),
            }
            return kinds[self.kind]()

    layer = layers.WeightDropout(keras.layers.Dense(2), 0.5, seed=1)
    layer.build((None, 6))

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.odd = layer, Odd()
            self.built = True

        def call(self, x):
            return self.odd(self.dense(x))

    for kind, message in (("ragged", "RaggedTensor"), ("text", "string"), ("scalar", r"\(\)")):
        model, Odd.kind = Model(), kind
        with pytest.raises(ValueError, match=f"the model returns a .*{message}.*dense tensors"):
            predicted(model, X, 2)


def test_batches_whose_outputs_differ_in_shape() -> None:
    layer = layers.WeightDropout(keras.layers.Dense(2), 0.5, seed=1)
    layer.build((None, None, 3))
    batches = [np.zeros((2, length, 3), "float32") for length in (4, 5)]
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=tf.TensorSpec((None, None, 3), tf.float32)
    )
    with pytest.raises(ValueError, match=r"differ in shape: \(4, 2\) and \(5, 2\).*Pad"):
        predicted(layer, dataset, 2)


def test_inside_a_function_it_says_where_to_call_it(model: keras.Model) -> None:
    with pytest.raises(RuntimeError, match="inside a tf.function.*call it outside"):
        tf.function(lambda: predicted(model, X, 2))()


def test_a_transformer() -> None:
    encoder = tfwd.layers.transformer.Bert(20, 8, 2, 2, 16, max_length=8, dropout=0.5)
    ids = np.arange(12, dtype="int32").reshape(3, 4)
    encoder(ids)
    wrapped = layers.WeightDropout(encoder, 0.25, "stack/.*/kernel", seed=1)
    check_moments(
        predicted(wrapped, ids, 3, 2, return_samples=True), by_hand(wrapped, encoder, ids, 3)
    )
