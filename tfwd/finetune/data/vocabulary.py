"""Vocabulary of a classifier: its classes, its tokenizer, and the encoder's config.

A run stores it in its folder. To label new texts, only this file and the run's weights are needed.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfwd.finetune import pretrained_folder
from tfwd.runs.errors import UserError
from tfwd.runs.storage.file_access import read_json
from tfwd.runs.storage.saved_vocabulary import SavedVocabulary


class Vocabulary(SavedVocabulary):
    """Names of the classes, the tokenizer, and the config of the encoder.

    Args:
        labels: the sorted names of the classes.
        encoder: dict. The published config of the encoder.
        tokenizer: dict. The content of a `tokenizer.json`.
        where: str. The source of config and tokenizer, for error messages.

    Raises:
        UserError: the tokenizer is damaged, or has another vocabulary than the encoder.

    Attributes:
        arguments: the config as arguments of `T.Bert`.
    """

    def __init__(
        self, labels: Sequence[str], encoder: dict[str, Any], tokenizer: dict[str, Any], where: str
    ):
        self.labels, self.encoder, self.tokenizer = list(labels), encoder, tokenizer
        self.arguments = pretrained_folder.encoder_arguments(encoder, where)
        self._tokenizer = _tokenizer(tokenizer, where)
        pretrained_folder.check_tokenizer(self._tokenizer, self.arguments, where)
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
        """Returns the token ids of texts, int32. Each text has at most `max_length` tokens.

        This number includes the special tokens.
        """
        most = self.arguments["max_length"]
        position = self.arguments.get("padding_position")
        most -= 0 if position is None else position + 1
        if max_length > most:
            raise UserError(
                f"data.max_length={max_length}: the encoder has {most} positions; give at most "
                f"{most}"
            )
        special = self._tokenizer.num_special_tokens_to_add(False)
        if max_length <= special:
            raise UserError(
                f"data.max_length={max_length}: each text has {special} special tokens: give more "
                f"than {special}"
            )
        self._tokenizer.enable_truncation(max_length)
        return [np.array(e.ids, np.int32) for e in self._tokenizer.encode_batch(list(texts))]

    def number(self, label: str) -> int:
        """Returns the number of a class."""
        return self._numbers[label]

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
