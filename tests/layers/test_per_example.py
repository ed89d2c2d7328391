"""`Dropout(per_example=True)` in Dense and EinsumDense: a mask for each example."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import two_replicas
from stack_marks import extended, needs_keras3, quick_rows

import tfwd
from tfwd import _keras, layers
from tfwd import parametrizations as P
from tfwd._random import example_masks, masks_and_normals

K = keras.layers
ATTENTION = {"output_shape": (None, 2, 3), "bias_axes": "de"}
KINDS = {
    "Dense": (lambda: K.Dense(3, activation="tanh"), (6, 5), "bi,bio->bo"),
    "Dense at positions": (lambda: K.Dense(3, use_bias=False), (6, 4, 5), "bti,bio->bto"),
    "EinsumDense": (
        lambda: K.EinsumDense("abc,cde->abde", **ATTENTION),
        (6, 4, 5),
        "btc,bcde->btde",
    ),
    "EinsumDense with dots": (
        lambda: K.EinsumDense("...x,xy->...y", output_shape=(3,), bias_axes="y"),
        (6, 5),
        "bi,bio->bo",
    ),
}
MODES = {
    "eager": lambda f, x: f,
    "graph": lambda f, x: tf.function(f),
    "any batch": lambda f, x: tf.function(
        f, input_signature=[tf.TensorSpec([None, *x.shape[1:]], x.dtype)]
    ),
    "xla": lambda f, x: tf.function(f, jit_compile=True),
}


@pytest.fixture(params=["one block", "several blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes with one plain block, or with several compiled ones."""
    if request.param == "several blocks":
        monkeypatch.setattr(example_masks, "BLOCK", 40)
        monkeypatch.setattr(masks_and_normals, "SMALL", 0)
    example_masks._traced.cache_clear()
    yield
    example_masks._traced.cache_clear()


def inputs(*shape: int, dtype: str = "float32") -> tf.Tensor:
    return tf.constant(np.random.default_rng(0).normal(size=shape), dtype)


def built(inner: keras.Layer, x: tf.Tensor, **options) -> keras.Layer:
    """Returns a wrapped layer, with weights that are no zeros."""
    wrapped = layers.WeightDropout(inner, 0.4, seed=1, per_example=True, **options)
    wrapped.build(tuple(x.shape))
    for weight in wrapped.weights:
        size = int(np.prod(weight.shape))
        weight.assign(np.linspace(0.5, 1.5, size).reshape(weight.shape))
    return wrapped


def gradients(call, layer: keras.Layer, x: tf.Tensor) -> list[tf.Tensor]:
    """Returns the outputs, and the gradients of a loss for the inputs and the weights."""
    sources = [_keras.variables.tf_variable(v) for v in layer.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = call(x)
        loss = tf.reduce_sum(y * tf.sin(tf.cast(tf.range(tf.size(y)), y.dtype) + 1)[0] + y**2)
    return [y, *tape.gradient(loss, [x, *sources])]


def by_hand(layer: keras.Layer, x: tf.Tensor, kernels: tf.Tensor, equation: str) -> list:
    """Returns the same as `gradients` with a plain layer called on each example by itself."""
    plain = layer.layer
    kernel = _keras.variables.tf_variable(plain.kernel)
    masks = np.array(kernels) / np.array(tf.convert_to_tensor(kernel))
    raw = tf.convert_to_tensor(kernel)
    bias = None if plain.bias is None else tf.convert_to_tensor(plain.bias)
    one = equation.replace("b", "")
    with tf.GradientTape() as tape:
        watched = [x, raw] if bias is None else [x, raw, bias]
        tape.watch(watched)
        rows = []
        for example in range(x.shape[0]):
            z = tf.einsum(one, x[example], raw * masks[example])
            rows.append(plain.activation(z if bias is None else z + bias))
        y = tf.stack(rows)
        loss = tf.reduce_sum(y * tf.sin(tf.cast(tf.range(tf.size(y)), y.dtype) + 1)[0] + y**2)
    return [y, *tape.gradient(loss, watched)]


@quick_rows(
    "several blocks-Dense-eager",
    "one block-EinsumDense-eager",
    "several blocks-Dense-graph",
    "one block-Dense-xla",
    "several blocks-Dense at positions-eager",
    "one block-Dense-any batch",
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_equal_a_loop_over_the_examples(kind, mode, blocks) -> None:
    make, shape, equation = KINDS[kind]
    x = inputs(*shape)
    layer = built(make(), x)
    kernels = layer.effective_weights(0, examples=6)["kernel"]
    assert 0.2 < float(tf.reduce_mean(tf.cast(kernels == 0.0, tf.float32))) < 0.6
    assert len({one.numpy().tobytes() for one in kernels}) == 6
    run = MODES[mode](lambda x: gradients(lambda x: layer(x, training=True), layer, x), x)
    for found, expected in zip(run(x), by_hand(layer, x, kernels, equation), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    assert layer.calls == 1
    np.testing.assert_array_equal(layer(x), layer.layer(x))  # evaluation has the raw kernel


def test_draws_go_by_seed_position_call_and_example() -> None:
    x = inputs(6, 5)
    one, two = (built(K.Dense(3), x) for _ in range(2))
    first = one(x, training=True)
    np.testing.assert_array_equal(first, two(x, training=True))
    assert not np.array_equal(first, one(x, training=True))
    # The first examples have the same masks in a smaller batch.
    np.testing.assert_allclose(one(x[:2], training=True), _at(two, 2, x)[:2], rtol=1e-5)
    same = one(tf.repeat(x[:1], 6, axis=0), training=True).numpy()
    assert len({row.tobytes() for row in same}) == 6
    positions = built(K.Dense(3), inputs(6, 4, 5))
    equal = positions(tf.repeat(inputs(6, 1, 5), 4, axis=1), training=True)
    np.testing.assert_allclose(equal[:, 0], equal[:, 3], rtol=1e-6)


def _at(layer: keras.Layer, call: int, x: tf.Tensor) -> np.ndarray:
    """Returns the outputs of a call of a Dense layer, from its effective weights."""
    kernels = layer.effective_weights(call, examples=x.shape[0])["kernel"]
    bias = tf.convert_to_tensor(layer.layer.bias)
    return (tf.einsum("bi,bio->bo", x, kernels) + bias).numpy()


def test_replicas_draw_differently() -> None:
    strategy = two_replicas()
    x = inputs(6, 5)
    with strategy.scope():
        layer = layers.WeightDropout(K.Dense(30), 0.5, seed=1, per_example=True)
        layer.build((6, 5))
    outputs = strategy.run(tf.function(lambda: layer(x, training=True)))
    first, second = strategy.experimental_local_results(outputs)
    assert not np.array_equal(first, second)
    np.testing.assert_allclose(first, _at(layer, 0, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy: str) -> None:
    x = inputs(6, 5)
    layer = built(K.Dense(3, dtype=policy), x)
    half = layer.layer.compute_dtype
    found = gradients(lambda x: layer(x, training=True), layer, x)
    assert found[0].dtype == half
    assert [g.dtype for g in found[2:]] == [tf.float32, tf.float32]
    expected = by_hand(layer, x, layer.effective_weights(0, 6)["kernel"], "bi,bio->bo")
    for one, other in zip(found, expected, strict=True):
        limit = 0.03 * float(tf.reduce_max(tf.abs(tf.cast(other, tf.float32))))
        np.testing.assert_allclose(
            tf.cast(one, tf.float32), tf.cast(other, tf.float32), rtol=0.03, atol=limit
        )


def test_a_training_flag_that_is_a_tensor() -> None:
    x = inputs(6, 5)
    layer = built(K.Dense(3), x)
    kernels = layer.effective_weights(0, examples=6)["kernel"]

    @tf.function
    def run(x: tf.Tensor, training: tf.Tensor) -> list[tf.Tensor]:
        return gradients(lambda x: layer(x, training=training), layer, x)

    expected = by_hand(layer, x, kernels, "bi,bio->bo")
    for found, one in zip(run(x, tf.constant(True)), expected, strict=True):
        np.testing.assert_allclose(found, one, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(run(x, tf.constant(False))[0], layer.layer(x), rtol=1e-6)


@quick_rows("small-True", "large-False")
@pytest.mark.parametrize("nested", [True, False])
def test_other_parametrizations_come_before_it(nested: bool, size: str) -> None:
    x = inputs(6, 5)
    dense, dropout = K.Dense(3, use_bias=False), P.Dropout(0.5, per_example=True)
    if nested:
        noisy = layers.VariationalNoise(dense, 0.1, seed=2)
        layer = layers.Parametrized(noisy, dropout, seed=1)
    else:
        chain = P.Chain([P.GaussianNoise(0.1), P.WeightNorm(), dropout])
        layer = layers.Parametrized(dense, {"kernel": chain}, seed=1)
    layer.build((6, 5))

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            y = layer(x, training=True)
        return y, tape.gradient(y, _keras.variables.tf_variable(dense.kernel))

    for call, run in enumerate((step, tf.function(step))):
        with tf.GradientTape() as tape:
            kernels = layer.effective_weights(call, examples=6)["kernel"]
            expected = tf.einsum("bi,bio->bo", x, kernels)
        slope = tape.gradient(expected, _keras.variables.tf_variable(dense.kernel))
        y, found = run(x)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found, slope, rtol=1e-5, atol=1e-6)
        dropped = kernels.numpy() == 0.0
        assert 0.2 < dropped.mean() < 0.8


def test_an_element_of_a_chain_draws_from_the_seed_of_its_place() -> None:
    def zeros(*before: P.Parametrization) -> np.ndarray:
        chain = P.Chain([*before, P.Dropout(0.5, per_example=True)])
        layer = layers.Parametrized(K.Dense(3), {"kernel": chain}, seed=1)
        layer.build((6, 5))
        return layer.effective_weights(0, examples=6)["kernel"].numpy() == 0.0

    alone = zeros()
    np.testing.assert_array_equal(alone, zeros())
    assert not np.array_equal(alone, zeros(P.WeightNorm()))


@extended
def test_a_model_trains_and_resumes_with_the_same_draws(tmp_path) -> None:
    x, y = inputs(8, 5), inputs(8, 1)
    plain = keras.Sequential([keras.Input((5,)), K.Dense(4, "relu"), K.Dense(1)])
    model = tfwd.parametrize(plain, {"kernel": P.Dropout(0.3, per_example=True)}, seed=1)
    model.compile("sgd", "mse")
    before = [np.array(w) for w in model.weights]
    model.fit(x, y, batch_size=3, epochs=1, verbose=0)  # the last batch is smaller
    assert all(not np.array_equal(a, b) for a, b in zip(before, model.weights, strict=True))
    assert [layer.calls for layer in model.layers] == [3, 3]
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(x, training=True), model(x, training=True))
    assert tfwd.unwrap(model).layers[0].kernel is plain.layers[0].kernel


def test_a_saved_training_function_has_the_gradient(tmp_path) -> None:
    x = inputs(6, 5)
    layer = built(K.Dense(3), x)
    layer(x)
    module = tf.Module()
    module.layer = layer
    spec = [tf.TensorSpec([None, 5], tf.float32)]
    module.train = tf.function(lambda x: layer(x, training=True), input_signature=spec)
    expected = by_hand(layer, x, layer.effective_weights(0, examples=6)["kernel"], "bi,bio->bo")
    tf.saved_model.save(module, str(tmp_path / "saved"))
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = loaded.train(x)
        loss = tf.reduce_sum(y * tf.sin(tf.cast(tf.range(tf.size(y)), y.dtype) + 1)[0] + y**2)
    np.testing.assert_allclose(y, expected[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(tape.gradient(loss, x), expected[1], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(layer(x, training=True), y, rtol=2e-5, atol=2e-5)  # still works


def test_config() -> None:
    wrapped = layers.WeightDropout(K.Dense(3), 0.3, per_example=True)
    again = layers.WeightDropout.from_config(wrapped.get_config())
    assert again.parametrization.per_example and again.rate == 0.3
    old = {k: v for k, v in wrapped.get_config().items() if k != "per_example"}
    assert not layers.WeightDropout.from_config(old).parametrization.per_example


class Doubled(K.Dense):
    """A Dense layer with a call of its own."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return 2 * super().call(inputs)


DROPOUT = P.Dropout(0.5, per_example=True)
WRONG = {
    "Conv1D": (lambda: K.Conv1D(3, 2), DROPOUT, (2, 6, 5), "'kernel'.* layer of type Conv1D"),
    "LSTM": (lambda: K.LSTM(3), DROPOUT, (2, 6, 5), "'recurrent_kernel'.* layer of type LSTM"),
    "Embedding": (lambda: K.Embedding(9, 3), DROPOUT, (2, 6), "'embeddings'.* type Embedding"),
    "bias": (lambda: K.Dense(3), {".*": DROPOUT}, (2, 5), "'bias'.* is not the layer's kernel"),
    "subclass": (lambda: Doubled(3), DROPOUT, (2, 5), "'kernel'.* Dense layer with custom code"),
    "regularizer": (
        lambda: K.Dense(3, activity_regularizer="l2"),
        DROPOUT,
        (2, 5),
        "'kernel'.* an activity regularizer",
    ),
    "model": (
        lambda: keras.Sequential([K.Dense(3)]),
        DROPOUT,
        (2, 5),
        "type Sequential, which contains layers",
    ),
    "equation": (
        lambda: K.EinsumDense("abc,acd->abd", output_shape=(6, 3)),
        DROPOUT,
        (2, 6, 5),
        "'kernel'.* the equation 'abc,acd->abd'",
    ),
    "order": (
        lambda: K.Dense(3),
        P.Chain([DROPOUT, P.WeightNorm()]),
        (2, 5),
        "'kernel'.* must be the last parametrization.* WeightNorm",
    ),
    "twice": (lambda: K.Dense(3), P.Chain([DROPOUT] * 2), (2, 5), "must be the last"),
    "wrapper inside": (
        lambda: layers.WeightDropout(K.Dense(3), 0.5, per_example=True),
        P.GaussianNoise(0.1),
        (2, 5),
        "must be the last parametrization.* GaussianNoise",
    ),
    "wrapper in a model": (
        lambda: keras.Sequential(
            [keras.Input((5,)), layers.WeightDropout(K.Dense(3), 0.5, per_example=True)]
        ),
        P.GaussianNoise(0.1),
        (2, 5),
        "must be the last parametrization.* GaussianNoise",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_layers_and_weights_are_errors(name: str) -> None:
    make, parametrization, shape, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        layers.Parametrized(make(), parametrization).build(shape)


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="noise_shape=.* cannot be combined with per_example"):
        P.Dropout(0.5, noise_shape=(None, 1), per_example=True)
    with pytest.raises(ValueError, match="no effective weight of a whole batch: call of_examples"):
        DROPOUT(tf.ones([2, 3]), tf.constant([1, 2]))
    layer = built(K.Dense(3), inputs(6, 5))
    for examples in (None, 0, True, 1.5):
        with pytest.raises(ValueError, match="'kernel' of layer 'dense.*number of examples"):
            layer.effective_weights(0, examples)
    with pytest.raises(ValueError, match="one dense tensor .* SparseTensor of shape"):
        layer(tf.sparse.from_dense(inputs(6, 5)), training=True)
    assert layer.calls == 0


def test_gradient_moments_are_an_error_in_training() -> None:
    model = keras.Sequential(
        [keras.Input((5,)), layers.WeightDropout(K.Dense(1), 0.5, per_example=True)]
    )
    x, y = inputs(4, 5), inputs(4, 1)
    with pytest.raises(ValueError, match="per_example=True.* pass training=False"):
        tfwd.gradients.moments(model, x, y, "mse", training=True)
    assert model.layers[0].calls == 0
    tfwd.gradients.moments(model, x, y, "mse", training=False)


@needs_keras3("LoRA")
def test_lora_is_an_error() -> None:
    x = inputs(6, 5)
    layer = built(K.Dense(3), x)
    layer.layer.enable_lora(2)
    with pytest.raises(ValueError, match="LoRA"):
        layer(x, training=True)
    assert layer.calls == 0
