"""The first layers of a published BERT, as features of a classifier.

    python examples/first_layers.py [FOLDER] [LAYERS]

FOLDER has a config.json and weights. The default is a tiny model of the tests.
"""

import sys
from pathlib import Path

import keras
import numpy as np

from tfwd.layers import transformer as T

TINY = Path(__file__).parents[1] / "tests" / "layers" / "transformer" / "published" / "bert"


def model(folder: str | Path, count: int) -> keras.Model:
    """Returns embeddings, the first layers, the mean over positions with text, and an answer."""
    bert = T.Bert.from_pretrained(folder, layers=range(count), dropout=0.1, name="bert")
    inputs = keras.Input((None,), dtype="int32")
    pooled = keras.layers.GlobalAveragePooling1D()(bert(inputs))
    return keras.Model(inputs, keras.layers.Dense(2, name="answer")(pooled))


def main(folder: str | Path = TINY, count: int = 1, epochs: int = 10) -> float:
    """Learns whether a text has token 7, and returns the accuracy on new texts."""
    keras.utils.set_random_seed(0)
    ids = np.random.default_rng(0).integers(5, 12, (1200, 8))
    ids[::3, 5:] = 0
    labels = (ids == 7).any(1).astype("int32")
    classifier = model(folder, count)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    classifier.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    classifier.fit(ids[:1000], labels[:1000], epochs=epochs, verbose=2)
    return classifier.evaluate(ids[1000:], labels[1000:], verbose=0, return_dict=True)["accuracy"]


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else TINY
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    print(f"accuracy on new texts: {main(folder, count):.2f}")
