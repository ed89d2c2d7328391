"""Custom embeddings and a small untrained stack: a classifier without a tokenizer.

    python examples/own_embeddings.py

Each text is a row of numbers, as of a sensor. The label says whether its first half is larger.
"""

import keras
import numpy as np

from tfwd.layers import transformer as T


def model(places: int = 12) -> keras.Model:
    """Returns a product for each position, learned positions, and two transformer layers."""
    inputs = keras.Input((places, 3))
    x = keras.layers.Dense(16, name="embeddings")(inputs)
    x = keras.layers.Dense(16, name="mixed")(keras.layers.LayerNormalization()(x))
    stack = T.TransformerStack(2, num_heads=2, hidden_size=16, intermediate_size=32, dropout=0.1)
    pooled = keras.layers.Flatten()(stack(x))
    return keras.Model(inputs, keras.layers.Dense(2, name="answer")(pooled))


def main(epochs: int = 8) -> float:
    """Trains, and returns the accuracy on new rows."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(1200, 12, 3)).astype("float32")
    y = (x[:, :6].mean((1, 2)) > x[:, 6:].mean((1, 2))).astype("int32")
    classifier = model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    classifier.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    classifier.fit(x[:1000], y[:1000], epochs=epochs, verbose=2)
    return classifier.evaluate(x[1000:], y[1000:], verbose=0, return_dict=True)["accuracy"]


if __name__ == "__main__":
    print(f"accuracy on new rows: {main():.2f}")
