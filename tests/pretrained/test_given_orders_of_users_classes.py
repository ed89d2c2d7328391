"""Orders of flattened images for weights of users' classes, which a key must give.

The oracle is the formula of each class in NumPy, with PyTorch's tensors.
"""

import keras
import numpy as np
import pytest
from flattened_images import saved, sequential
from pointwise_convolution import CONV, behind_flatten, conv, pointwise

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(2)
layers = keras.layers


class Scale(layers.Layer):
    """A factor for each feature."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=(shape[-1],))

    def call(self, x):
        return x * self.scale


class Noisy(layers.Dense):
    """A dense layer with a second matrix and a factor for each input."""

    def build(self, shape):
        super().build(shape)
        self.sigma = self.add_weight(name="sigma", shape=(shape[-1], self.units))
        self.noise = self.add_weight(name="noise", shape=(shape[-1],))

    def call(self, x):
        return super().call(x) + (x * self.noise) @ self.sigma


@pytest.mark.parametrize("kind", ["a factor", "a second matrix"])
def test_weights_whose_use_is_not_known(kind, tmp_path):
    """Checks that each weight of a user's layer on flattened features needs its own order."""
    shape = {"flattened": (4, 2, 3)}
    w, sigma, v = RNG.normal(size=(5, 24)), RNG.normal(size=(5, 24)), RNG.normal(size=24)
    if kind == "a factor":
        model, x, flat = behind_flatten(Scale(name="n"), layers.Dense(5, use_bias=False, name="f"))
        own, expected = {"n/scale": "n.v"}, (flat * v) @ w.T
    else:
        model, x, flat = behind_flatten(Noisy(5, use_bias=False, name="f"))
        own, expected = {"f/sigma": "f.sigma", "f/noise": "f.v"}, flat @ w.T + (flat * v) @ sigma.T
    stored = {"f.weight": w, "f.sigma": sigma, "f.v": v, "n.v": v}
    folder, ignore = saved(tmp_path, stored, CONV), [k for k in stored if k not in own.values()]
    ignore.remove("f.weight")
    keys = {"c": "c", "f/kernel": Key("f.weight", **shape)}
    square = {"f/sigma": {"transposed": True}}
    plain = {path: Key(name, **square.get(path, {})) for path, name in own.items()}
    with pytest.raises(PlanError, match="does not know how|names a|flattened="):
        load(model, folder, mapping={**keys, **plain}, ignore=ignore)
    given = {path: Key(name, **square.get(path, {}), **shape) for path, name in own.items()}
    load(model, folder, mapping={**keys, **given}, ignore=ignore)
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-3)


def test_a_second_matrix_whose_outputs_become_an_image(tmp_path):
    """Checks that a matrix that a subclass adds is not loaded as it is beside the kernel."""
    noisy = Noisy(24, use_bias=False, name="f")
    model = sequential(keras.Input((5,)), noisy, layers.Reshape((2, 3, 4)), conv())
    stored = {"f.weight": np.ones((24, 5)), "f.sigma": np.ones((24, 5)), "f.noise": np.ones(5)}
    keys = {"c": "c", "f/kernel": "f.weight", "f/noise": Key("f.noise", transposed=False)}
    keys["f/sigma"] = Key("f.sigma", transposed=True)
    with pytest.raises(PlanError, match="f/sigma': the model uses it in an operation whose"):
        load(model, saved(tmp_path, stored, CONV), mapping=keys)


class Scaled(layers.Dense):
    """A dense layer with a factor for each output."""

    def build(self, shape):
        super().build(shape)
        self.scale = self.add_weight(name="scale", shape=(self.units,))

    def call(self, x):
        return super().call(x) * self.scale


@pytest.mark.parametrize("advice", ["channels first", "()", "transposed=False"])
def test_advice_for_a_subclass_whose_outputs_become_an_image(advice, tmp_path):
    """Checks each answer that the error offers."""
    model = sequential(keras.Input((5,)), Scaled(24, name="f"), layers.Reshape((2, 3, 4)), conv())
    w, b, v, x = (RNG.normal(size=size) for size in ((24, 5), 24, 24, (2, 5)))
    stored = {"f.weight": w, "f.bias": b, "f.v": v}
    names = {"f/kernel": "f.weight", "f/bias": "f.bias", "f/scale": "f.v"}
    with pytest.raises(PlanError) as error:
        load(model, saved(tmp_path, stored, CONV), mapping={"c": "c", **names})
    problems = [line for line in str(error.value).splitlines() if "'f/" in line]
    assert len(problems) == 3
    for line in problems:
        assert "unflattened=" in line and "()" in line
    features = ((x @ w.T + b) * v).reshape(2, 4, 2, 3).transpose(0, 2, 3, 1)
    if advice == "channels first":
        kernel, other = {"flattened": (), "unflattened": (4, 2, 3)}, {"unflattened": (4, 2, 3)}
    elif advice == "()":
        kernel, other = {"flattened": (), "unflattened": ()}, {"unflattened": ()}
    else:
        kernel = {"transposed": False, "flattened": (), "unflattened": ()}
        other = {"transposed": False, "unflattened": ()}
        stored["f.weight"] = w.T
    if advice != "channels first":
        features = ((x @ w.T + b) * v).reshape(2, 2, 3, 4)
    keys = {path: Key(name, **other) for path, name in names.items()}
    keys["f/kernel"] = Key("f.weight", **kernel)
    load(model, saved(tmp_path, stored, CONV), mapping={"c": "c", **keys})
    np.testing.assert_allclose(model(x), pointwise(features), rtol=1e-4, atol=1e-3)


class OwnDense(layers.Layer):
    """A dense layer with its own weights and as many outputs as inputs."""

    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(shape[-1], shape[-1]))
        self.b = self.add_weight(name="b", shape=(shape[-1],))

    def call(self, x):
        return x @ self.w + self.b


@pytest.mark.parametrize("own", [True, False])
def test_an_order_for_all_weights_of_a_users_layer(own, tmp_path):
    """Checks that a pattern for the layer gives no order: the bias belongs to the outputs."""
    layer = OwnDense(name="f") if own else Scaled(24, name="f")
    model, x, flat = behind_flatten(layer)
    w, b, v = RNG.normal(size=(24, 24)), RNG.normal(size=24), RNG.normal(size=24)
    names = ("f.w", "f.b") if own else ("f.weight", "f.bias")
    stored = dict(zip(names, (w, b), strict=True))
    if not own:
        stored["f.scale"] = v
    folder, shape = saved(tmp_path, stored, CONV), {"flattened": (4, 2, 3)}
    key = Key("f", transposed=True, **shape)
    last = "f/b" if own else "f/scale"
    with pytest.raises(
        PlanError, match=f"all weights of 'f' gives it no order, so map '{last}' by"
    ):
        load(model, folder, mapping={"c": "c", "f": key})
    keys = {"f/w": Key("f.w", transposed=True, **shape), "f/b": Key("f.b", flattened=())}
    if not own:
        keys = {"f/kernel": Key("f.weight", **shape), "f/bias": "f.bias"}
        keys |= {"f/kernel": Key("f.weight", unflattened=(), **shape)}
        keys |= {"f/scale": Key("f.scale", flattened=(), transposed=True)}
    load(model, folder, mapping={"c": "c", **keys})
    expected = (flat @ w.T + b) * (1 if own else v)
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-3)
