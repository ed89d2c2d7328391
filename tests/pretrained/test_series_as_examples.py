"""Series that become examples, with patches as steps: PatchTST's head flattens features first."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved
from traced_images import Model

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers
STEPS, SERIES, PATCHES, SIZE, WIDTH = 12, 3, 4, 3, 5
X = RNG.normal(size=(2, STEPS, SERIES)).astype("float32")
WEIGHTS = {
    "p.weight": RNG.normal(size=(WIDTH, SIZE)),
    "n.weight": RNG.uniform(0.5, 2, WIDTH),
    "n.bias": RNG.normal(size=WIDTH),
    "f.weight": RNG.normal(size=(6, PATCHES * WIDTH)),
}


def patches_of_series(m, x):
    x = tf.reshape(tf.transpose(x, (0, 2, 1)), (-1, PATCHES, SIZE))
    x = m.n(m.p(x))
    return m.f(tf.reshape(x, (-1, PATCHES * WIDTH)))


def in_numpy():
    """Returns the outputs of the normalization, [examples, series, patches, features]."""
    x = X.transpose(0, 2, 1).reshape(2, SERIES, PATCHES, SIZE) @ WEIGHTS["p.weight"].T
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * WEIGHTS["n.weight"] + WEIGHTS["n.bias"]


@pytest.mark.parametrize(
    ("flattened", "order"), [((WIDTH, PATCHES), (0, 1, 3, 2)), ((), (0, 1, 2, 3))]
)
def test_a_head_on_patches_needs_an_order(flattened, order, tmp_path):
    model = Model(
        patches_of_series,
        p=layers.Dense(WIDTH, use_bias=False, name="p"),
        n=layers.LayerNormalization(epsilon=1e-5, name="n"),
        f=layers.Dense(6, use_bias=False, name="f"),
    )
    model(X)
    folder = saved(tmp_path, WEIGHTS)
    mapping = {name: name for name in "pnf"}
    with pytest.raises(PlanError, match="'f/kernel': .* whether PyTorch's model permutes") as error:
        load(model, folder, mapping=mapping)
    assert "'p/" not in str(error.value) and "'n/" not in str(error.value)
    load(model, folder, mapping={**mapping, "f": Key("f", flattened=flattened)})
    features = in_numpy().transpose(order).reshape(2 * SERIES, PATCHES * WIDTH)
    np.testing.assert_allclose(model(X), features @ WEIGHTS["f.weight"].T, rtol=1e-3, atol=1e-4)
