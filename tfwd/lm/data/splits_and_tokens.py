"""Reads the training, validation and test text, and cuts a text into tokens.

The default text is in every Python: the topics of its reference manual, which `pydoc` shows. It has
about 65,000 words and differs a little between versions. No download is needed. The text is used
unchanged, with its lines of asterisks and its code. Another text is a folder of three files, like
WikiText and the Penn Treebank, or a single file that is split by position.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import NamedTuple

from tfwd.runs.errors import UserError, listing
from tfwd.runs.storage.file_access import read_text

EOS = "<eos>"
LEVELS = ("word", "char")
_NAMES = ("{}.txt", "wiki.{}.tokens", "ptb.{}.txt")


class Splits(NamedTuple):
    """Training, validation and test part of a text, with a name for reports."""

    train: str
    valid: str
    test: str
    name: str


def load_splits(
    path: str | None = None, fractions: tuple[float, float, float] = (0.9, 0.05, 0.05)
) -> Splits:
    """Reads the training, validation and test text.

    Args:
        path: a folder with `train.txt`, `valid.txt` and `test.txt` (or names like
            `wiki.train.tokens` and `ptb.train.txt`). A single text file is split by position. None
            or "" reads the embedded text.
        fractions: the shares of a single text's three parts, in characters. A cut is moved to the
            next line end, so that no line is divided. If there is no line end nearby, the cut is
            moved to the next space. If there is no space nearby, the cut is not moved.

    Returns:
        The `Splits`. No part is empty.

    Raises:
        UserError: a file is missing, empty, not UTF-8, or too short to be split.

    Example:
    >>> splits = load_splits()
    >>> len(splits.train) > 10 * len(splits.test)
    True
    """
    if not path:
        return _split(_embedded(), fractions, f"Python {platform.python_version()} topics")
    path = os.fspath(path)
    if not os.path.isdir(path):
        return _split(read_text(path), fractions, os.path.basename(path))
    for pattern in _NAMES:
        files = [os.path.join(path, pattern.format(part)) for part in ("train", "valid", "test")]
        if os.path.exists(files[0]):
            train, valid, test = map(read_text, files)
            return Splits(train, valid, test, os.path.basename(os.path.abspath(path)))
    raise UserError(
        f"data.path={path}: this folder needs train.txt, valid.txt and test.txt; "
        f"it has {listing(path)}"
    )


def tokenize(text: str, level: str = "word") -> list[str]:
    r"""Cuts a text into tokens.

    Word level: the words between white space, and `<eos>` at the end of each line. A blank line
    gives no token. (The programs of the AWD-LSTM paper also give an `<eos>` for a blank line. It is
    easy to predict, so their perplexities on WikiText-2 are a little lower.) Character level: every
    character, including the line feed.

    Args:
        text: str. The text.
        level: "word" or "char".

    Returns:
        The tokens.

    Raises:
        UserError: the level is unknown.

    Example:
    >>> tokenize("to be\n\nor not\n")
    ['to', 'be', '<eos>', 'or', 'not', '<eos>']
    >>> tokenize("a b\n", "char")
    ['a', ' ', 'b', '\n']
    """
    check_level(level)
    if level == "char":
        return list(text)
    tokens: list[str] = []
    for line in text.split("\n"):  # splitlines() also cuts at form feeds and similar characters
        words = line.split()
        if words:
            tokens += words
            tokens.append(EOS)
    return tokens


def detokenize(tokens: Sequence[str], level: str = "word") -> str:
    r"""Joins tokens to a text: words with one space between, and a line end for `<eos>`.

    Args:
        tokens: the tokens.
        level: "word" or "char".

    Returns:
        The text. At character level it equals the tokenized text. At word level it has no blank
        lines and no repeated or leading white space.

    Raises:
        UserError: the level is unknown.

    Example:
    >>> detokenize(["to", "be", "<eos>", "or"])
    'to be\nor'
    """
    check_level(level)
    if level == "char":
        return "".join(tokens)
    parts: list[str] = []
    for token in tokens:
        if token == EOS:
            parts.append("\n")
        else:
            parts.append(f" {token}" if parts and parts[-1] != "\n" else token)
    return "".join(parts)


def check_level(level: str) -> None:
    """Raises a `UserError` unless `level` is one of `LEVELS`."""
    if level not in LEVELS:
        raise UserError(f"data.level={level!r}: give word or char")


def _embedded() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:  # some systems package Python without its documentation
        raise UserError(
            "this Python comes without pydoc_data, the embedded text; give data.path=FOLDER"
        ) from error
    return "\n".join(topics[key] for key in sorted(topics))


def _split(text: str, fractions: tuple[float, float, float], name: str) -> Splits:
    if min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-6:
        raise ValueError(f"fractions={fractions}: give three positive numbers with sum 1")
    first = _cut(text, int(len(text) * fractions[0]))
    second = _cut(text, int(len(text) * (fractions[0] + fractions[1])), first)
    parts = text[:first], text[first:second], text[second:]
    if not all(part.strip() for part in parts):
        raise UserError(
            f"{name} is too short ({len(text)} characters) to be split into training, validation "
            "and test text; give a longer text, or a folder with three files"
        )
    return Splits(*parts, name)


def _cut(text: str, position: int, start: int = 0) -> int:
    """Returns the position of a cut at or soon after `position`: after a line end or a space."""
    reach = position + max(1000, len(text) // 100)  # ignore a line end after this position
    for end in ("\n", " "):
        found = text.find(end, max(position, start + 1) - 1, reach)
        if found >= 0 and text[found + 1 :].strip():
            return found + 1
    return max(position, start)
