"""The files of this folder, written by the installed Keras: `python tests/lm/weights/write.py`.

Each file has the weights of a small model, and its logits for `IDS`.
"""

from pathlib import Path

import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd.lm.model import LanguageModel, named_weights
from tfwd.runs.storage import weight_files

IDS = [[1, 2, 3], [4, 0, 6]]
CASES = {
    "tied": {},
    "untied": {"tie_weights": False},
    "perturbed": {"weight_dropout": 0.5, "variational_noise": 0.1, "embedding_dropout": 0.1},
}


def make(case: str) -> LanguageModel:
    """Returns a model of one of the cases, whose weights are to be set."""
    return LanguageModel(7, embedding_dim=4, hidden_units=(5, 4), seed=1, **CASES[case])


def main() -> None:
    """Writes the files."""
    random = np.random.default_rng(_keras.GENERATION)
    for case in CASES:
        model, stem = make(case), f"keras{_keras.GENERATION}-{case}"
        for variable in model.trainable_variables:
            variable.assign(random.normal(size=variable.shape).astype(np.float32))
        weight_files.save(
            Path(__file__).with_name(f"{stem}.npz"), named_weights(model), "language model"
        )
        logits = model(tf.constant(IDS, tf.int32), training=False).logits.numpy()
        np.save(Path(__file__).with_name(f"{stem}-logits.npy"), logits)


if __name__ == "__main__":
    main()
