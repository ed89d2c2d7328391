"""Finding a NaN: which layer, which rows of the batch, and why.

    python examples/find_nan.py

Texts of different lengths are padded with 0. One text of the data is empty, so it contains only
padding. Its mean is 0/0. This one text turns all weights into NaN.
"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfwd


class Pooling(keras.layers.Layer):
    """The mean over the positions with text. Its defect: it divides by 0 if the text is empty."""

    def call(self, embedded, ids):
        text = tf.cast(ids != 0, embedded.dtype)[:, :, tf.newaxis]
        return tf.reduce_sum(embedded * text, axis=1) / tf.reduce_sum(text, axis=1)


def make_model() -> keras.Model:
    """Returns a classifier of texts."""
    ids = keras.Input((12,), dtype="int32", name="ids")
    embedded = keras.layers.Embedding(50, 16, name="words")(ids)
    hidden = keras.layers.Dense(16, "relu", name="hidden")(embedded)
    pooled = Pooling(name="pooling")(hidden, ids)
    model = keras.Model(ids, keras.layers.Dense(1, name="score")(pooled))
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns padded texts and labels. Text number 333 is empty."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 50, (640, 12))
    ids[np.arange(12) >= rng.integers(1, 13, (640, 1))] = 0
    ids[333] = 0
    return ids, (ids == 7).any(1).astype("float32")


def main(folder: str | Path = ".") -> float:
    """Returns the share of texts with which training continues, after the step is skipped."""
    keras.utils.set_random_seed(0)
    x, y = data()
    plain = make_model()
    plain.fit(x, y, batch_size=32, shuffle=False, verbose=0)
    lost = sum(int(np.isnan(w).any()) for w in plain.get_weights())
    print(f"without a check: {lost} of {len(plain.weights)} weights are NaN after an epoch\n")

    check = tfwd.callbacks.FiniteCheck("raise", plot=Path(folder, "find_nan.png"))
    try:
        make_model().fit(x, y, batch_size=32, shuffle=False, verbose=0, callbacks=[check])
    except tfwd.numerics.NonFiniteError as error:
        print(error)

    # Until the data are corrected, the bad batch can be skipped.
    check = tfwd.callbacks.FiniteCheck("skip")
    model = make_model()
    model.fit(x, y, batch_size=32, shuffle=False, verbose=0, callbacks=[check])
    print(f"\nwith skip: {len(check.reports)} of 20 steps was skipped")
    assert all(np.isfinite(w).all() for w in model.get_weights())
    return 1 - len(check.reports) / 20


if __name__ == "__main__":
    main(*sys.argv[1:])
