"""Vocabulary of a classifier: its classes, its tokenizer, and the encoder's config.

A run stores it in its folder. With the run's weights, it is all that is needed to label new texts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from tfwd.finetune import published
from tfwd.finetune.data.examples import Example, Splits, check, read_parts
from tfwd.finetune.data.python_docstrings import load_python_docstrings
from tfwd.runs.errors import UserError
from tfwd.runs.storage.files import read_json, write_atomically
from tfwd.runs.storage.state import fingerprint


class Vocabulary:
    """Names of the classes, the tokenizer, and the config of the encoder.

    Args:
        labels: the sorted names of the classes.
        encoder: dict. The published config of the encoder.
        tokenizer: dict. The content of a `tokenizer.json`.
        where: str. The source of config and tokenizer, for messages.

    Raises:
        UserError: the tokenizer is damaged, or has another vocabulary than the encoder.

    Attributes:
        arguments: the config as arguments of `T.Bert`.
    """

    def __init__(
        self, labels: Sequence[str], encoder: dict[str, Any], tokenizer: dict[str, Any], where: str
    ):
        self.labels, self.encoder, self.tokenizer = list(labels), encoder, tokenizer
        self.arguments = published.encoder_arguments(encoder, where)
        self._tokenizer = _tokenizer(tokenizer, where)
        published.check_tokenizer(self._tokenizer, self.arguments, where)
        self._tokenizer.no_padding()  # batches are padded elsewhere
        self._numbers = {label: number for number, label in enumerate(self.labels)}

    def __len__(self) -> int:
        """Returns the number of classes."""
        return len(self.labels)

    @property
    def padding_id(self) -> int:
        """Returns the number of the padding token."""
        return self.arguments["padding_id"] or 0

    def encode(self, texts: Sequence[str], max_length: int) -> list[np.ndarray]:
        """Returns the tokens of texts, int32, with special tokens and at most `max_length` each."""
        most = self.arguments["max_length"]
        position = self.arguments.get("padding_position")
        most -= 0 if position is None else position + 1
        if max_length > most:
            raise UserError(f"data.max_length={max_length}: the encoder has {most} positions")
        own = self._tokenizer.num_special_tokens_to_add(False)
        if max_length <= own:
            raise UserError(
                f"data.max_length={max_length}: each text has {own} special tokens: give more"
            )
        self._tokenizer.enable_truncation(max_length)
        return [np.array(e.ids, np.int32) for e in self._tokenizer.encode_batch(list(texts))]

    def number(self, label: str) -> int:
        """Returns the number of a class."""
        return self._numbers[label]

    def fingerprint(self) -> str:
        """Returns sixteen hexadecimal digits, which only equal vocabularies share."""
        return hashlib.sha256(self._json().encode()).hexdigest()[:16]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the vocabulary as JSON, in one step.

        Raises:
            UserError: the file cannot be written.
        """
        write_atomically(path, self._json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Reads the file that `save` wrote.

        Raises:
            UserError: the file is missing, or not complete.
        """
        content = read_json(path, "file of classes")
        try:
            labels = content["labels"]
            if not labels or not all(isinstance(label, str) for label in labels):
                raise ValueError("its labels are not texts")
            encoder, tokenizer = dict(content["encoder"]), dict(content["tokenizer"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{os.fspath(path)} is not a complete file of classes: {error}"
            ) from error
        return cls(labels, encoder, tokenizer, os.fspath(path))

    def _json(self) -> str:
        return json.dumps(
            {"labels": self.labels, "encoder": self.encoder, "tokenizer": self.tokenizer}
        )


def _tokenizer(content: dict[str, Any], where: str) -> Any:
    if importlib.util.find_spec("tokenizers") is None:
        raise UserError(
            "tfwd-finetune and tfwd-classify need tokenizers: in a checkout of tfwd, "
            "pip install '.[finetune]'"
        )
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises no more specific exception
        raise UserError(f"{where}: the tokenizer cannot be read: {str(error)[:200]}") from error


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
        """Returns the number of training texts, in words."""
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
    encoder, tokenizer = published.read_folder(config.model.pretrained)
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
