"""Corpus of a language model: a text as token ids, with its vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import ml_collections
import numpy as np

from tfwd.lm.data.splits_and_tokens import load_splits, tokenize
from tfwd.lm.data.vocabulary import Vocabulary
from tfwd.runs.storage.data_fingerprint import fingerprint


class Corpus(NamedTuple):
    """Text as token ids, with its vocabulary.

    Attributes:
        name: str. The text's name.
        vocabulary: `Vocabulary` of the training part.
        texts: dict of "train", "valid" and "test", int32 `[tokens]` each.
    """

    name: str
    vocabulary: Vocabulary
    texts: dict[str, np.ndarray]

    @property
    def size(self) -> str:
        """Returns the number of training tokens, as text."""
        return f"{len(self.texts['train']):,} tokens"

    def fingerprint(self) -> str:
        """Returns a short hash of the token ids."""
        return fingerprint(self.texts)


def read_corpus(data: ml_collections.ConfigDict) -> Corpus:
    """Reads the text of a configuration's `data` keys, and converts it to token ids.

    Raises:
        UserError: the text is missing or cannot be read.
    """
    splits = load_splits(data.path or None)
    names = ("train", "valid", "test")
    tokens = {name: tokenize(getattr(splits, name), data.level) for name in names}
    vocabulary = Vocabulary.from_tokens(tokens["train"], data.level, data.min_count)
    texts = {name: vocabulary.encode(split) for name, split in tokens.items()}
    return Corpus(splits.name, vocabulary, texts)
