"""The embeddings of one published model, and the stack of another.

    python examples/mixed_models.py [ALBERT] [BERT]

Each is a folder with a config.json and weights. The defaults are tiny models of the tests. ALBERT's
word vectors have fewer features; ALBERT widens them. The result must be as wide as BERT's layers.
"""

import sys
from pathlib import Path

import keras
import numpy as np

from tfwd.layers import transformer as T

TINY = Path(__file__).parents[1] / "tests" / "layers" / "transformer" / "published"


def model(albert: str | Path, bert: str | Path) -> keras.Model:
    """Returns ALBERT's embeddings, BERT's layers, BERT's pooler and an answer."""
    inputs = keras.Input((None,), dtype="int32")
    embeddings = T.Embeddings.from_pretrained(albert, name="albert")
    stack = T.TransformerStack.from_pretrained(bert, name="bert")
    pooled = T.Pooler.from_pretrained(bert)(stack(embeddings(inputs)))
    return keras.Model(inputs, keras.layers.Dense(2, name="answer")(pooled))


def main(albert=TINY / "albert", bert=TINY / "bert", epochs: int = 10) -> float:
    """Learns whether a text has token 7, and returns the accuracy on new texts."""
    keras.utils.set_random_seed(0)
    ids = np.random.default_rng(0).integers(5, 12, (1200, 6))
    labels = (ids == 7).any(1).astype("int32")
    classifier = model(albert, bert)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    classifier.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    classifier.fit(ids[:1000], labels[:1000], epochs=epochs, verbose=2)
    return classifier.evaluate(ids[1000:], labels[1000:], verbose=0, return_dict=True)["accuracy"]


if __name__ == "__main__":
    print(f"accuracy on new texts: {main(*sys.argv[1:]):.2f}")
