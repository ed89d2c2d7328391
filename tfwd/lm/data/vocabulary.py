"""Vocabulary of a language model, which converts tokens to ids.

The vocabulary has the tokens of the training text only. It is saved with the model. A program
compares fingerprints to reject a checkpoint of another vocabulary. Otherwise the model would
predict wrong tokens without an error.
"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Iterable, Sequence

import numpy as np

from tfwd.lm.data.splits_and_tokens import EOS, check_level
from tfwd.runs.errors import UserError
from tfwd.runs.storage.file_access import read_json
from tfwd.runs.storage.saved_vocabulary import SavedVocabulary

UNK = "<unk>"


class Vocabulary(SavedVocabulary):
    """Fixed list of tokens. The id of a token is its position in the list.

    The id 0 is `<unk>`, which stands for every token that is not in the list. At word level the id
    1 is `<eos>`, the end of a line. At character level no character equals `<unk>`, which has five.
    A word `<unk>` or `<eos>` of the text counts as this symbol.

    Args:
        tokens: the tokens, without repetition. The symbols come first. `from_tokens` makes the list
            from a text.
        level: "word" or "char".

    Raises:
        ValueError: a token is repeated, or a symbol is not in its position.

    Example:
    >>> vocabulary = Vocabulary.from_tokens(["a", "b", "a", "<eos>"], "word", min_count=2)
    >>> vocabulary.tokens
    ['<unk>', '<eos>', 'a']
    >>> vocabulary.encode(["a", "b", "<eos>"])
    array([2, 0, 1], dtype=int32)
    >>> vocabulary.decode([2, 0])
    ['a', '<unk>']
    """

    def __init__(self, tokens: Sequence[str], level: str = "word"):
        check_level(level)
        specials = _specials(level)
        self.level = level
        self.tokens = list(tokens)
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self._ids) != len(self.tokens):
            repeated = collections.Counter(self.tokens).most_common(1)[0][0]
            raise ValueError(f"the token {repeated!r} is in the vocabulary more than once")
        if self.tokens[: len(specials)] != specials:
            raise ValueError(f"a {level} vocabulary begins with {specials}, not {self.tokens[:2]}")

    @classmethod
    def from_tokens(cls, tokens: Iterable[str], level: str, min_count: int = 1) -> Vocabulary:
        """Counts the tokens of the training text.

        Args:
            tokens: the tokens of the training text.
            level: "word" or "char".
            min_count: int. Tokens with a lower count become `<unk>`.

        Returns:
            The vocabulary: the symbols, then the tokens by decreasing count. Tokens with equal
            counts are in the order of their first appearance.

        Raises:
            UserError: no token is frequent enough.
        """
        counts = collections.Counter(tokens)  # keeps the order of first appearance
        specials = _specials(level)
        kept = [
            token
            for token, count in counts.most_common()  # a stable sort
            if count >= min_count and token not in specials
        ]
        if not kept:
            raise UserError(
                f"data.min_count={min_count}: no token of the training text is that frequent; "
                f"the most frequent token occurs {max(counts.values(), default=0)} times"
            )
        return cls(specials + kept, level)

    def __len__(self) -> int:
        """Returns the number of tokens, including the symbols."""
        return len(self.tokens)

    @property
    def unk_id(self) -> int:
        """Returns the id of `<unk>`."""
        return self._ids[UNK]

    @property
    def eos_id(self) -> int | None:
        """Returns the id of `<eos>`; None at character level."""
        return self._ids.get(EOS) if self.level == "word" else None

    def encode(self, tokens: Sequence[str]) -> np.ndarray:
        """Returns the ids of `tokens`, int32 `[len(tokens)]`. Unknown tokens get `unk_id`."""
        get, unk = self._ids.get, self.unk_id
        return np.fromiter((get(token, unk) for token in tokens), np.int32, len(tokens))

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Returns the tokens with these ids.

        Raises:
            ValueError: an id is outside `[0, len(self))`.
        """
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < len(self.tokens):
                last = len(self.tokens) - 1
                raise ValueError(f"no token has the id {i}: give an id from 0 to {last}")
        return [self.tokens[i] for i in ids]

    def unknown(self, tokens: Iterable[str]) -> list[str]:
        """Returns the tokens that are not in the vocabulary, each once, in order of appearance."""
        known = set(self.tokens)
        return list(dict.fromkeys(token for token in tokens if token not in known))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Reads the file that `save` wrote.

        Raises:
            UserError: the file is missing, or is not a complete vocabulary.
        """
        content = read_json(path, "vocabulary")
        try:
            if not all(isinstance(token, str) for token in content["tokens"]):
                raise ValueError("its tokens are not texts")
            return cls(content["tokens"], content["level"])
        except (ValueError, KeyError, TypeError, UserError) as error:
            raise UserError(f"{path} is not a complete vocabulary: {error}") from error

    def _json(self) -> str:
        return json.dumps({"level": self.level, "tokens": self.tokens}, indent=0)


def _specials(level: str) -> list[str]:
    return [UNK, EOS] if level == "word" else [UNK]
