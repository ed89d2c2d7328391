"""Lower layers for two texts apart, upper layers for both together (as in DeFormer, 2020).

    python examples/apart_then_together.py [FOLDER] [APART]

The lower layers of a question can then be computed once for many documents. FOLDER has a
config.json and weights. The default is a tiny model of the tests.
"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfwd.layers import transformer as T

TINY = Path(__file__).parents[1] / "tests" / "layers" / "transformer" / "published" / "bert"


class ApartThenTogether(keras.Model):
    """A classifier of the relation of two texts."""

    def __init__(self, folder: str | Path, apart: int) -> None:
        super().__init__()
        count = T.TransformerStack.from_config(folder).num_layers
        self.embeddings = T.Embeddings.from_pretrained(folder)
        self.lower = T.TransformerStack.from_pretrained(folder, layers=range(apart))
        self.upper = T.TransformerStack.from_pretrained(folder, layers=range(apart, count))
        self.answer = keras.layers.Dense(2, name="answer")

    def call(self, texts):
        halves, masks = [], []
        for kind, ids in enumerate(texts):
            embedded = self.embeddings(ids, token_type_ids=tf.fill(tf.shape(ids), kind))
            masks.append(tf.not_equal(ids, 0))
            halves.append(self.lower(embedded, mask=masks[-1]))
        both = self.upper(tf.concat(halves, axis=1), mask=tf.concat(masks, axis=1))
        return self.answer(both[:, 0])


def main(folder: str | Path = TINY, apart: int = 1, epochs: int = 6) -> float:
    """Learns which of two texts has a word more often, and returns the accuracy on new texts."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    one, two = rng.integers(5, 9, (2, 2400, 5))
    labels = ((one == 5).sum(axis=1) > (two == 5).sum(axis=1)).astype("int32")
    model = ApartThenTogether(folder, apart)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    model.fit((one[:2000], two[:2000]), labels[:2000], epochs=epochs, verbose=2)
    seen = model.evaluate((one[2000:], two[2000:]), labels[2000:], verbose=0, return_dict=True)
    return seen["accuracy"]


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else TINY
    apart = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    print(f"accuracy on new texts: {main(folder, apart):.2f}")
