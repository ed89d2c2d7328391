"""Random models with images against NumPy, which computes them as PyTorch does: channels first.

Every model either loads with the right outputs, or is refused. The mapping is plain, or has the
true shapes of all flattened images.
"""

import keras
import numpy as np
import pytest
from keras import layers
from numpy.lib.stride_tricks import sliding_window_view
from safetensors.numpy import save_file

from tfwd.pretrained import Key, PlanError, load


class Model:
    """A model in Keras, and its outputs in PyTorch's order of axes.

    Args:
        seed: int. Seed of the layers and of all numbers.
        given: bool. True if the mapping gives the true shape of each flattened image.
    """

    def __init__(self, seed, given):
        self.rng, self.given = np.random.default_rng(seed), given
        self.tensors, self.mapping, self.count = {}, {}, 0
        size = (self.pick(2, 3, 4), *(self.pick(4, 5, 6) for _ in "hw"))
        self.x = self.normal(2, *size)
        self.input = keras.Input((*size[1:], size[0]))

    def pick(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def normal(self, *shape):
        return self.rng.normal(size=shape).astype("float32")

    def layer(self, make, **tensors):
        """Returns a new layer with a key, whose tensors are in the file."""
        name = f"l{self.count}"
        self.count += 1
        self.tensors |= {f"{name}.{key}": np.ascontiguousarray(w) for key, w in tensors.items()}
        self.mapping[f"/{name}"] = name
        return make(name=name)

    def give(self, layer, **options):
        if self.given:
            self.mapping[f"/{layer.name}"] = Key(layer.name, **options)

    def convolution(self, k, t, filters=None):
        size, filters = self.pick(1, 2), filters or self.pick(2, 3, 4)
        w, b = self.normal(filters, t.shape[1], size, size), self.normal(filters)
        conv = self.layer(lambda name: layers.Conv2D(filters, size, name=name), weight=w, bias=b)
        windows = sliding_window_view(t, (size, size), (2, 3))
        return conv(k), np.einsum("nchwij,ocij->nohw", windows, w) + b[:, None, None]

    def normalization(self, k, t):
        gamma, beta, mean = (self.normal(t.shape[1]) for _ in range(3))
        var = self.rng.uniform(0.5, 2, t.shape[1]).astype("float32")
        norm = self.layer(
            lambda name: layers.BatchNormalization(epsilon=1e-5, name=name),
            weight=gamma,
            bias=beta,
            running_mean=mean,
            running_var=var,
        )
        g, b, m, v = (a.reshape(-1, *(1,) * (t.ndim - 2)) for a in (gamma, beta, mean, var))
        if t.ndim == 2 and self.flat is not None:
            self.give(norm, flattened=self.flat)
        return norm(k), (t - m) / np.sqrt(v + 1e-5) * g + b

    def activation(self, k, t):
        return layers.ReLU()(k), np.maximum(t, 0)

    def padding(self, k, t):
        return layers.ZeroPadding2D(((1, 0), (0, 1)))(k), np.pad(
            t, ((0, 0),) * 2 + ((1, 0), (0, 1))
        )

    def pooling(self, k, t):
        windows = sliding_window_view(t, (2, 2), (2, 3))
        if self.pick(True, False):
            return layers.MaxPooling2D(2, 1)(k), windows.max((-2, -1))
        return layers.AveragePooling2D(2, 1)(k), windows.mean((-2, -1))

    def residual(self, k, t):
        filters = t.shape[1]
        w, b = self.normal(filters, filters, 1, 1), self.normal(filters)
        conv = self.layer(lambda name: layers.Conv2D(filters, 1, name=name), weight=w, bias=b)
        added = np.einsum("nchw,oc->nohw", t, w[..., 0, 0]) + b[:, None, None]
        merge = self.pick(layers.Add, layers.Multiply, layers.Concatenate)()
        together = {
            "Add": lambda: t + added,
            "Multiply": lambda: t * added,
            "Concatenate": lambda: np.concatenate([t, added], 1),
        }[type(merge).__name__]()
        return merge([k, conv(k)]), together

    def dense_on_channels(self, k, t):
        """PyTorch moves the channels last, and maybe back. A later flatten needs a shape.

        The shape shows the order, because no other axis has 11 entries.
        """
        w, b = self.normal(11, t.shape[1]), self.normal(11)
        dense = self.layer(lambda name: layers.Dense(11, name=name), weight=w, bias=b)
        self.is_last, self.is_proved = self.pick(True, False), False
        return dense(k), np.einsum("nchw,oc->nohw", t, w) + b[:, None, None]

    def blocks_of_positions(self, k, t):
        """A layer on the channels of rows, columns or tokens, which is merged with the image.

        PyTorch moves the channels last for it, and maybe back.
        """
        k, t = self.convolution(k, t, 11)
        _, _, height, width = t.shape
        self.is_last, self.is_proved = self.pick(True, False), False
        shapes = [(height * width, 11), (1, height, width, 11)]
        shapes += [(n, height // n, width, 11) for n in (2, 3) if height % n == 0]
        shapes += [(height, n, width // n, 11) for n in (2, 3) if width % n == 0]
        parts, moved = layers.Reshape(self.pick(*shapes))(k), np.moveaxis(t, 1, -1)
        w, b = self.normal(11, 11), self.normal(11)
        if self.pick(True, False):
            layer = self.layer(lambda name: layers.Dense(11, name=name), weight=w, bias=b)
            moved = moved @ w.T + b
        else:
            norm = self.layer(
                lambda name: layers.LayerNormalization(epsilon=1e-3, name=name),
                weight=w[0],
                bias=b,
            )
            layer, mean = norm, moved.mean(-1, keepdims=True)
            moved = (moved - mean) / np.sqrt(moved.var(-1, keepdims=True) + 1e-3) * w[0] + b
        parts = layers.Reshape((height, width, 11))(layer(parts))
        moved = np.moveaxis(moved, -1, 1)
        if self.pick(True, False):
            return layers.Add()([k, parts]), t + moved
        return layers.Concatenate()([k, parts]), np.concatenate([t, moved], 1)

    def flatten(self, k, t):
        if self.is_last:
            self.flat, flat = (), t.transpose(0, 2, 3, 1)
        else:
            self.flat, flat = t.shape[1:], t
        return layers.Flatten()(k), flat.reshape(len(t), -1)

    def dense(self, k, t, units=None):
        units = units or self.pick(5, 6, 7)
        w, b = self.normal(units, t.shape[1]), self.normal(units)
        dense = self.layer(lambda name: layers.Dense(units, name=name), weight=w, bias=b)
        if self.flat is not None:
            self.give(dense, flattened=self.flat)
        self.flat = None
        return dense(k), t @ w.T + b

    def image(self, k, t):
        """A dense layer whose outputs become an image."""
        size = (self.pick(2, 3), self.pick(2, 3, 4), self.pick(3, 4))
        before = self.flat
        k, t = self.dense(k, t, int(np.prod(size)))
        options = (
            {"unflattened": size} if before is None else {"flattened": before, "unflattened": size}
        )
        name = f"l{self.count - 1}"
        if self.given:
            self.mapping[f"/{name}"] = Key(name, **options)
        if self.pick(True, False):
            k, t = self.activation(k, t)
        self.is_last = False
        return layers.Reshape((*size[1:], size[0]))(k), t.reshape(len(t), *size)

    def build(self):
        """Returns the model in Keras and its outputs, as PyTorch computes them."""
        of_image = [self.convolution] * 3 + [
            *(self.normalization, self.activation, self.padding, self.pooling, self.residual),
        ]
        k, t = self.convolution(self.input, self.x)  # which shows that the input is an image
        self.flat, self.is_last, self.is_proved = None, False, True
        for part in range(self.pick(1, 2, 2)):
            if t.ndim == 2:
                break
            for _ in range(self.pick(1, 2, 3)):
                if min(t.shape[2:]) < 3:
                    break
                k, t = self.pick(*of_image)(k, t)
            if part == 0 and self.pick(*[False] * 3, True):
                k, t = self.pick(self.dense_on_channels, self.blocks_of_positions)(k, t)
            k, t = self.flatten(k, t)
            for step in self.pick([], [self.normalization], [self.activation]):
                k, t = step(k, t)
            k, t = self.dense(k, t) if self.pick(True, False) else (k, t)
            if part == 0 and self.pick(True, False):
                k, t = self.image(k, t)
                k, t = self.convolution(k, t)
        if t.ndim == 2:
            k, t = self.dense(k, t)
        else:
            t = t.transpose(0, 2, 3, 1)
        return keras.Model(self.input, k), t


@pytest.mark.parametrize("given", [False, True], ids=["plain", "true_shapes"])
@pytest.mark.parametrize(
    "seeds", [range(start, start + 25) for start in range(0, 100, 25)], ids=str
)
def test_random_models(seeds, given, tmp_path):
    """Checks PyTorch's outputs. Only models with a layer on channels need a shape."""
    for seed in seeds:
        random = Model(seed, given)
        model, expected = random.build()
        path = tmp_path / f"{seed}.safetensors"
        save_file(random.tensors, path)
        try:
            load(model, path, mapping=random.mapping)
        except PlanError as error:
            assert not (given or random.is_proved), f"seed {seed}: {error}"
            continue
        scale = np.abs(expected).max() + 1e-6
        found = np.asarray(model(random.x.transpose(0, 2, 3, 1)))
        error = np.abs(found - expected).max() / scale
        assert found.shape == expected.shape and error < 1e-4, f"seed {seed}: {error}"
