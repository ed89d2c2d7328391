"""Square kernels: the shape does not show which axis has the outputs.

The expected outputs are products in NumPy.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved, sequential

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(2)
layers = keras.layers


def dense(units, name):
    return layers.Dense(units, use_bias=False, name=name)


def three():
    """Returns a model with a square kernel between two others."""
    return sequential(keras.Input((3,)), dense(4, "a"), dense(4, "b"), dense(2, "c"))


@pytest.mark.parametrize("answer", [False, True])
@pytest.mark.parametrize("others", ["by the mapping", "by their shapes"])
def test_other_kernels_with_the_inputs_first(others, answer, tmp_path):
    """Checks files like Hugging Face's GPT-2: `weight` has the inputs first."""
    a, b, c, x = (RNG.normal(size=size) for size in ((3, 4), (4, 4), (4, 2), (5, 3)))
    folder = saved(tmp_path, {"a.weight": a, "b.weight": b, "c.weight": c})
    first = Key(r"\1", transposed=False) if others == "by the mapping" else r"\1"
    model = three()
    with pytest.raises(PlanError, match=r"'b/kernel': key 'b.weight' is \(4, 4\).*'a.weight' has"):
        load(model, folder, mapping={"([ac])": first, "b": "b"})
    given = {"([ac])": Key(r"\1", transposed=False), "b": Key("b", transposed=answer)}
    load(model, folder, mapping=given)
    expected = x @ a @ (b.T if answer else b) @ c
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)


def test_other_kernels_with_the_outputs_first(tmp_path):
    a, b, c, x = (RNG.normal(size=size) for size in ((4, 3), (4, 4), (2, 4), (5, 3)))
    model = three()
    folder = saved(tmp_path, {"a.weight": a, "b.weight": b, "c.weight": c})
    load(model, folder, mapping={"(.)": r"\1"})
    np.testing.assert_allclose(model(x), x @ a.T @ b.T @ c.T, rtol=1e-4, atol=1e-5)


class Positions(layers.Layer):
    """Adds a table of positions, as keras-hub's `PositionEmbedding`."""

    def build(self, shape):
        self.embeddings = self.add_weight(name="embeddings", shape=shape[1:])

    def call(self, x):
        return x + self.embeddings


def test_a_table_does_not_show_the_order_of_kernels(tmp_path):
    """Checks that the order of a table of positions says nothing about a square kernel."""
    table, b, x = (RNG.normal(size=size) for size in ((3, 4), (4, 4), (5, 3, 4)))
    model = sequential(keras.Input((3, 4)), Positions(name="p"), dense(4, "b"))
    folder = saved(tmp_path, {"position_embeddings.weight": table, "b.weight": b})
    key = Key("position_embeddings.weight", transposed=False)
    load(model, folder, mapping={"p": key, "b": "b"})
    np.testing.assert_allclose(model(x), (x + table) @ b.T, rtol=1e-4, atol=1e-5)


def test_the_biases_of_a_gru_do_not_show_the_order_of_kernels(tmp_path):
    model = sequential(keras.Input((3, 5)), layers.GRU(4, name="g"), dense(4, "b"))
    recurrent = {"weight_ih": (12, 5), "weight_hh": (12, 4), "bias": (2, 12), "b.weight": (4, 4)}
    tensors = {name: RNG.normal(size=shape) for name, shape in recurrent.items()}
    mapping = {
        "g/(.*/)?kernel": "weight_ih",
        "g/(.*/)?recurrent_kernel": "weight_hh",
        "g/(.*/)?bias": Key("bias", transposed=False),
        "b": "b",
    }
    load(model, saved(tmp_path, tensors), mapping=mapping)
    np.testing.assert_allclose(model.get_layer("b").get_weights()[0], tensors["b.weight"].T)


@pytest.mark.parametrize("other", ["other_projection", "c.weight", "other.kernel"])
def test_a_parameter_without_a_known_name(other, tmp_path):
    """Checks a parameter such as `text_projection` of CLIP, which multiplies from the right.

    No other matrix shows its order, not even one with a similar key. A key that ends as in Keras
    may belong to a buffer of PyTorch.
    """
    a, b, c, x = (RNG.normal(size=size) for size in ((4, 3), (4, 4), (2, 4), (5, 3)))
    tensors = {"a.w": a, "text_projection": b, other: c}
    keys = {"a/kernel": "a.w", "b/kernel": "text_projection", "c/kernel": other}
    if other.endswith("kernel"):
        keys["a/kernel"], keys["c/kernel"] = (Key(k, transposed=True) for k in ("a.w", other))
    folder, model = saved(tmp_path, tensors), three()
    with pytest.raises(PlanError, match="key 'text_projection' is"):
        load(model, folder, mapping=keys)
    load(model, folder, mapping={**keys, "b/kernel": Key("text_projection", transposed=False)})
    np.testing.assert_allclose(model(x), x @ a.T @ b @ c.T, rtol=1e-4, atol=1e-5)


def test_an_ignored_key_shows_no_order(tmp_path):
    """Checks a buffer of PyTorch whose name ends as in Keras, such as a kernel that blurs."""
    normalization = layers.LayerNormalization(name="norm")
    inner = [keras.Input((3, 2, 5)), layers.Conv2D(4, 1, name="c"), layers.Flatten()]
    tensors = {"c_w": RNG.normal(size=(4, 5, 1, 1)), "c_b": RNG.normal(size=4)}
    tensors |= {"g": RNG.normal(size=24), "b": np.zeros(24)}
    keys = {"c/kernel": "c_w", "c/bias": "c_b", "norm/gamma": "g", "norm/beta": "b"}
    for more, options in (({}, {}), ({"blur.kernel": np.ones((3, 3))}, {"ignore": "blur.kernel"})):
        model = sequential(*inner, normalization)
        load(model, saved(tmp_path, tensors | more), mapping=keys, **options)
        expected = tensors["g"].reshape(4, 3, 2).transpose(1, 2, 0).ravel()
        np.testing.assert_allclose(normalization.gamma, expected, rtol=1e-6)


def test_a_square_matrix_of_attention(tmp_path):
    """Checks a kernel with heads. Its tensor in the file is a square matrix."""
    layer = layers.EinsumDense("abc,cde->abde", (None, 2, 3), name="q")
    model = sequential(keras.Input((5, 6)), layer, layers.Reshape((5, 6)), dense(2, "o"))
    q, o, x = (RNG.normal(size=size) for size in ((6, 6), (6, 2), (2, 5, 6)))
    folder = saved(tmp_path, {"q.weight": q, "o.weight": o})
    keys = {"o": Key("o", transposed=False), "q": "q"}
    with pytest.raises(PlanError, match=r"'q/kernel': key 'q.weight' is \(6, 6\)"):
        load(model, folder, mapping=keys)
    for transposed, expected in ((True, x @ q.T @ o), (False, x @ q @ o)):
        load(model, folder, mapping={**keys, "q": Key("q", transposed=transposed)})
        np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)


def test_the_recurrent_kernel_of_a_simple_rnn(tmp_path):
    """Checks a network as textbooks write it: `tanh(x @ w_xh + h @ w_hh)`."""
    layer = layers.SimpleRNN(5, use_bias=False, name="r")
    model = sequential(keras.Input((7, 3)), layer)
    w, u, x = RNG.normal(size=(3, 5)), RNG.normal(size=(5, 5)) / 3, RNG.normal(size=(2, 7, 3))
    folder = saved(tmp_path, {"w_xh": w, "w_hh": u})
    keys = {"r/.*/kernel": Key("w_xh", transposed=False), "r/.*/recurrent_kernel": "w_hh"}
    with pytest.raises(PlanError, match=r"recurrent_kernel': key 'w_hh' is \(5, 5\).*'w_xh' has"):
        load(model, folder, mapping=keys)
    keys["r/.*/recurrent_kernel"] = Key("w_hh", transposed=False)
    load(model, folder, mapping=keys)
    h = np.zeros((2, 5))
    for t in range(7):
        h = np.tanh(x[:, t] @ w + h @ u)
    np.testing.assert_allclose(model(x), h, rtol=1e-4, atol=1e-5)


def test_the_users_word_for_one_square_kernel_is_not_evidence_for_another(tmp_path):
    model = sequential(keras.Input((4,)), dense(4, "a"), dense(4, "b"))
    folder = saved(tmp_path, {"q_proj_weight": np.eye(4), "text_projection": np.eye(4)})
    keys = {"a/kernel": Key("q_proj_weight", transposed=True), "b/kernel": "text_projection"}
    with pytest.raises(PlanError, match="the end of 'text_projection' does not show it"):
        load(model, folder, mapping=keys)


class OwnLinear(layers.Layer):
    """A layer with the inputs first, as Hugging Face's `Conv1D`."""

    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(shape[-1], 8))

    def call(self, x):
        return x @ self.w


def test_a_custom_layer_with_the_inputs_first_is_evidence(tmp_path):
    model = sequential(keras.Input((4,)), OwnLinear(name="a"), dense(8, "b"))
    folder = saved(tmp_path, {"a.weight": np.ones((4, 8)), "b.weight": np.eye(8)})
    keys = {"a/w": Key("a.weight", transposed=False), "b": "b"}
    with pytest.raises(PlanError, match="'b/kernel': key 'b.weight' .* and 'a.weight' has the inp"):
        load(model, folder, mapping=keys)


@pytest.mark.parametrize("how", ["ignored", "not strict"])
@pytest.mark.parametrize("inputs_first", [True, False])
def test_the_bias_of_a_kernel_that_is_not_loaded(inputs_first, how, tmp_path):
    """Checks a part of GPT-2: only its square kernels are loaded, and others show the order."""
    b, other, x = RNG.normal(size=(4, 4)), RNG.normal(size=(4, 12)), RNG.normal(size=(5, 4))
    tensors = {"b.weight": b, "b.bias": np.zeros(4), "attention.bias": np.zeros(12)}
    tensors["attention.weight"] = other if inputs_first else other.T
    folder = saved(tmp_path, tensors)
    model = sequential(keras.Input((4,)), layers.Dense(4, name="b"))
    options = {"ignore": "attention.*"} if how == "ignored" else {"strict": False}
    if inputs_first:
        with pytest.raises(PlanError, match="'attention.weight' has the inputs first"):
            load(model, folder, mapping={"b": "b"}, **options)
    given = Key("b", transposed=False) if inputs_first else "b"
    load(model, folder, mapping={"b": given}, **options)
    np.testing.assert_allclose(model(x), x @ (b if inputs_first else b.T), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_torch", [False, True])
def test_a_convolution_whose_shape_fits_both_orders(in_torch, tmp_path):
    """Checks files of Haiku, and `.npz` files in PyTorch's order. TensorFlow computes the outputs.

    The file names do not show the order: the second kernel does, and so does the first one's key.
    """
    first, second = (layers.Conv2D(n, 3, use_bias=False, name=f"c{n}") for n in (3, 4))
    model = sequential(keras.Input((7, 6, 3)), first, second)
    a, b = RNG.normal(size=(3, 3, 3, 3)), RNG.normal(size=(3, 3, 3, 4))
    x = RNG.normal(size=(2, 7, 6, 3))
    expected = tf.nn.conv2d(tf.nn.conv2d(x, a, 1, "VALID"), b, 1, "VALID")
    keys = {"c3/kernel": "conv_w", "c4/kernel": "conv_1_w"}
    if in_torch:
        path = tmp_path / "model.npz"
        in_file = (kernel.transpose(3, 2, 0, 1).astype("float32") for kernel in (a, b))
        np.savez(path, **dict(zip(keys.values(), in_file, strict=True)))
    else:
        path = saved(tmp_path, {"conv_w": a, "conv_1_w": b})
    with pytest.raises(PlanError, match=rf"'conv_1_w', transposed={in_torch}\)"):
        load(model, path, mapping=keys)
    keys["c4/kernel"] = Key("conv_1_w", transposed=in_torch)
    order = "PyTorch's" if in_torch else "Keras's"
    with pytest.raises(PlanError, match=f"'conv_w' is .*'conv_1_w' has {order} order of axes"):
        load(model, path, mapping=keys)
    keys["c3/kernel"] = Key("conv_w", transposed=in_torch)
    load(model, path, mapping=keys)
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-3)


def test_a_convolution_does_not_show_the_order_of_a_matrix(tmp_path):
    """Checks parameters by hand: `conv2d(x, conv_w)` has the outputs first, `x @ fc_w` has not."""
    convolution = layers.Conv2D(4, 1, use_bias=False, name="conv")
    model = sequential(
        keras.Input((3, 2, 5)), convolution, layers.GlobalAveragePooling2D(), dense(4, "fc")
    )
    w, fc, x = (RNG.normal(size=size) for size in ((4, 5, 1, 1), (4, 4), (2, 3, 2, 5)))
    folder = saved(tmp_path, {"conv_w": w, "fc_w": fc})
    keys = {"conv/kernel": "conv_w", "fc/kernel": "fc_w"}
    with pytest.raises(PlanError, match="the end of 'fc_w' does not show it"):
        load(model, folder, mapping=keys)
    load(model, folder, mapping={**keys, "fc/kernel": Key("fc_w", transposed=False)})
    expected = (x @ w[..., 0, 0].T).mean((1, 2)) @ fc
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)


def test_a_convolution_that_fits_both_orders_alone(tmp_path):
    """Checks a parameter of PyTorch, whose convolutions have one order."""
    model = sequential(keras.Input((7, 6, 3)), layers.Conv2D(3, 3, use_bias=False, name="c"))
    w, x = RNG.normal(size=(3, 3, 3, 3)), RNG.normal(size=(2, 7, 6, 3))
    load(model, saved(tmp_path, {"w": w}), mapping={"c/kernel": "w"})
    expected = tf.nn.conv2d(x, w.transpose(2, 3, 1, 0), 1, "VALID")
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-4)
