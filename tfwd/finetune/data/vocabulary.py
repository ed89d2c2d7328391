"""Classes, tokens and numbers: what makes arrays of labelled texts.

A run keeps it in its folder, with the tokenizer and the encoder's config: with the run's weights,
it is all that is needed to label new texts.
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
from tfwd.finetune.data.manual import load_manual
from tfwd.runs.errors import UserError
from tfwd.runs.storage.files import read_json, write_atomically
from tfwd.runs.storage.state import fingerprint


class Vocabulary:
    """The names of the classes, a tokenizer, and the config of the encoder that it is for.

    Args:
        labels: the classes, sorted.
        encoder: the published config.
        tokenizer: what is in a `tokenizer.json`.
        where: where these are from, for messages.

    Raises:
        UserError: the tokenizer is damaged, or of another vocabulary than the encoder.

    Attributes:
        arguments: what the config says, as arguments of `T.Bert`.
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
        """The number of classes."""
        return len(self.labels)

    @property
    def padding_id(self) -> int:
        """The number of the token that is none."""
        return self.arguments["padding_id"] or 0

    def encode(self, texts: Sequence[str], max_length: int) -> list[np.ndarray]:
        """The tokens of texts, int32, with the tokenizer's own; at most so many each."""
        most = self.arguments["max_length"]
        position = self.arguments.get("padding_position")
        most -= 0 if position is None else position + 1
        if max_length > most:
            raise UserError(
                f"data.max_length={max_length}: the encoder has places for {most} tokens"
            )
        own = self._tokenizer.num_special_tokens_to_add(False)
        if max_length <= own:
            raise UserError(
                f"data.max_length={max_length}: {own} tokens of each text are the tokenizer's own: "
                "give more"
            )
        self._tokenizer.enable_truncation(max_length)
        return [np.array(e.ids, np.int32) for e in self._tokenizer.encode_batch(list(texts))]

    def number(self, label: str) -> int:
        """The number of a class."""
        return self._numbers[label]

    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that two share only if they are equal."""
        return hashlib.sha256(self._json().encode()).hexdigest()[:16]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it as JSON, in one step.

        Raises:
            UserError: the file cannot be written.
        """
        write_atomically(path, self._json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Reads what `save` wrote.

        Raises:
            UserError: the file is missing, or not whole.
        """
        content = read_json(path, "file of classes")
        try:
            labels = content["labels"]
            if not labels or not all(isinstance(label, str) for label in labels):
                raise ValueError("its labels are no texts")
            encoder, tokenizer = dict(content["encoder"]), dict(content["tokenizer"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{os.fspath(path)} is not a whole file of classes: {error}") from error
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
    except Exception as error:  # the library raises nothing more particular
        raise UserError(f"{where}: the tokenizer cannot be read: {str(error)[:200]}") from error


class Encoded(NamedTuple):
    """Labelled texts in numbers.

    Attributes:
        ids: of each text its tokens, int32.
        labels: int32 `[texts]`.
    """

    ids: list[np.ndarray]
    labels: np.ndarray


class Corpus(NamedTuple):
    """Labelled texts.

    Attributes:
        name: what they are called.
        vocabulary: classes, tokenizer, and the encoder's config.
        texts: "train", "valid" and "test".
        encoded: the same in numbers.
    """

    name: str
    vocabulary: Vocabulary
    texts: dict[str, list[Example]]
    encoded: dict[str, Encoded]

    @property
    def size(self) -> str:
        """How much there is to train on, in words."""
        return f"{len(self.texts['train']):,} texts"

    def fingerprint(self) -> str:
        """A short hash of the numbered texts."""
        arrays = {}
        for name, (ids, labels) in self.encoded.items():
            arrays[f"{name} ids"] = np.concatenate(ids)
            arrays[f"{name} lengths"] = np.array([len(text) for text in ids])
            arrays[f"{name} labels"] = labels
        return fingerprint(arrays)


def load_splits(data: ml_collections.ConfigDict) -> Splits:
    """Reads what a configuration's `data` names.

    Args:
        data: with `path`, `text`, `label`, `valid_share` and `train_examples`.

    Returns:
        The `Splits`: each label is in the training part, at least twice, and in another one.

    Raises:
        UserError: a file is missing, or something in it is wrong; the message names the line.
    """
    splits = read_parts(data) if data.path else load_manual()
    train = splits.parts["train"]
    if data.train_examples and data.train_examples < len(train):
        chosen = np.random.default_rng(0).permutation(len(train))[: data.train_examples]
        splits.parts["train"] = [train[number] for number in sorted(chosen)]
    check(splits)
    return splits


def read_corpus(config: ml_collections.ConfigDict) -> Corpus:
    """Reads the texts and the tokenizer that a configuration names.

    Raises:
        UserError: something is missing, cannot be read, or does not fit.
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
