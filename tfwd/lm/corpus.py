"""A text that is read, cut into tokens, and numbered: what a run trains and is measured on."""

from __future__ import annotations

from typing import NamedTuple

import ml_collections
import numpy as np

from tfwd.lm.text import load_splits, tokenize
from tfwd.lm.vocabulary import Vocabulary


class Corpus(NamedTuple):
    """A numbered text.

    Attributes:
        name: what the text is called.
        vocabulary: of its training part.
        texts: "train", "valid" and "test", int32 `[tokens]` each.
    """

    name: str
    vocabulary: Vocabulary
    texts: dict[str, np.ndarray]


def read_corpus(data: ml_collections.ConfigDict) -> Corpus:
    """Reads the text that a configuration's `data` names.

    Raises:
        UserError: the text is missing or cannot be read.
    """
    splits = load_splits(data.path or None)
    names = ("train", "valid", "test")
    tokens = {name: tokenize(getattr(splits, name), data.level) for name in names}
    vocabulary = Vocabulary.from_tokens(tokens["train"], data.level, data.min_count)
    texts = {name: vocabulary.encode(split) for name, split in tokens.items()}
    return Corpus(splits.name, vocabulary, texts)
