"""Corpus of a classifier: its labelled texts, as text and as numbers, with their vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import ml_collections
import numpy as np

from tfwd.finetune import pretrained_folder
from tfwd.finetune.data.labelled_texts import Example, Splits, check, read_parts
from tfwd.finetune.data.python_docstrings import load_python_docstrings
from tfwd.finetune.data.vocabulary import Vocabulary
from tfwd.runs.storage.data_fingerprint import fingerprint


class Encoded(NamedTuple):
    """Labelled texts as numbers.

    Attributes:
        ids: list of the tokens of each text, int32.
        labels: int32 `[texts]`.
    """

    ids: list[np.ndarray]
    labels: np.ndarray


class Corpus(NamedTuple):
    """Labelled texts with their vocabulary.

    Attributes:
        name: str. The name of the data.
        vocabulary: the classes, the tokenizer, and the encoder's config.
        texts: dict of the examples, by "train", "valid" and "test".
        encoded: dict of the same examples as numbers.
    """

    name: str
    vocabulary: Vocabulary
    texts: dict[str, list[Example]]
    encoded: dict[str, Encoded]

    @property
    def size(self) -> str:
        """Returns the number of training texts, as text."""
        return f"{len(self.texts['train']):,} texts"

    def fingerprint(self) -> str:
        """Returns a short hash of the numbered texts."""
        arrays = {}
        for name, (ids, labels) in self.encoded.items():
            arrays[f"{name} ids"] = np.concatenate(ids)
            arrays[f"{name} lengths"] = np.array([len(text) for text in ids])
            arrays[f"{name} labels"] = labels
        return fingerprint(arrays)


def load_splits(data: ml_collections.ConfigDict) -> Splits:
    """Reads the examples of a configuration's `data` keys.

    Args:
        data: config with `path`, `text`, `label`, `valid_share` and `train_examples`.

    Returns:
        The `Splits`. Each label has at least two training examples, and is in another part too.

    Raises:
        UserError: a file is missing or wrong. The message names the line.
    """
    splits = read_parts(data) if data.path else load_python_docstrings()
    train = splits.parts["train"]
    if data.train_examples and data.train_examples < len(train):
        chosen = np.random.default_rng(0).permutation(len(train))[: data.train_examples]
        splits.parts["train"] = [train[number] for number in sorted(chosen)]
    check(splits)
    return splits


def read_corpus(config: ml_collections.ConfigDict) -> Corpus:
    """Reads the texts and the tokenizer of a configuration.

    Raises:
        UserError: something is missing, unreadable, or does not fit.
    """
    encoder, tokenizer = pretrained_folder.read_folder(config.model.pretrained)
    splits = load_splits(config.data)
    labels = sorted({example.label for example in splits.parts["train"]})
    where = f"model.pretrained={config.model.pretrained}"
    vocabulary = Vocabulary(labels, encoder, tokenizer, where)
    encoded = {
        name: Encoded(
            vocabulary.encode([example.text for example in part], config.data.max_length),
            np.array([vocabulary.number(example.label) for example in part], np.int32),
        )
        for name, part in splits.parts.items()
    }
    return Corpus(splits.name, vocabulary, splits.parts, encoded)
