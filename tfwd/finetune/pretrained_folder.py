"""Reads the folder of a pretrained model: its config, its tokenizer, and its weights."""

from __future__ import annotations

import os
from typing import Any

from tfwd.runs.errors import UserError, listing
from tfwd.runs.storage.file_access import read_json

FILES = "config.json, model.safetensors and tokenizer.json"
_ROUNDED = 1024  # embeddings may have a number of rows that is rounded up to a multiple of this


def read_folder(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads the config and the tokenizer in a pretrained folder.

    Raises:
        UserError: there is no such folder, its encoder is not supported, or a file is missing.
    """
    if not path:
        raise UserError(f"model.pretrained is missing: give a folder with {FILES}")
    if not os.path.isdir(path):
        raise UserError(
            f"model.pretrained={path}: there is no such folder; give a folder with {FILES}"
        )
    for name in ("config.json", "tokenizer.json"):
        if not os.path.exists(os.path.join(path, name)):
            raise UserError(
                f"model.pretrained={path} has no {name}: give a folder with {FILES}; "
                f"it has {listing(path)}"
            )
    config = read_json(os.path.join(path, "config.json"), "config")
    if not isinstance(config, dict):
        raise UserError(f"{os.path.join(path, 'config.json')} is not a config of a model")
    tokenizer = read_json(os.path.join(path, "tokenizer.json"), "tokenizer")
    if not isinstance(tokenizer, dict):
        raise UserError(f"{os.path.join(path, 'tokenizer.json')} is not a tokenizer")
    return config, tokenizer


def encoder_arguments(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the encoder's settings in a published config, as arguments of `T.Bert`.

    Raises:
        UserError: the family or kind of the model is not supported.
    """
    from tfwd.layers.transformer.formats.published_configs import read_config

    try:
        read = read_config(config)
    except ValueError as error:
        raise UserError(f"{where}: {str(error).removeprefix('the config: ')}") from error
    if read.model_type == "t5":
        raise UserError(
            f"{where}: model_type='t5' is not only an encoder; give an encoder like BERT"
        )
    return read.arguments()


def check_tokenizer(tokenizer: Any, arguments: dict[str, Any], where: str) -> None:
    """Checks that a tokenizer has the encoder's vocabulary.

    The encoder's embedding may have more rows than the tokenizer has tokens, because the number of
    rows may be rounded up to a multiple of at most 1,024. It may not have fewer rows. The id of the
    padding token must be the id that the encoder masks.

    Raises:
        UserError: the tokenizer has another vocabulary.
    """
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    wanted = arguments["vocabulary_size"]
    if not size <= wanted < size + _ROUNDED:
        raise UserError(
            f"{where}: the tokenizer has another vocabulary: it has {size:,} tokens, and the "
            f"encoder has {wanted:,}; use the tokenizer.json of this model"
        )
    named = [tokenizer.token_to_id(name) for name in ("[PAD]", "<pad>")]
    numbers = [number for number in named if number is not None]
    if not numbers and tokenizer.padding:
        numbers = [tokenizer.padding["pad_id"]]
    if numbers and arguments["padding_id"] not in numbers:
        raise UserError(
            f"{where}: the tokenizer has another vocabulary: it pads with {numbers[0]}, and the "
            f"encoder pads with {arguments['padding_id']}; use the tokenizer.json of this model"
        )


def load_weights(encoder: Any, path: str) -> list[str]:
    """Reads the weights of a pretrained folder into an encoder, tensor by tensor.

    Args:
        encoder: a `T.Bert` from the folder's config.
        path: path of the folder.

    Returns:
        The paths of the variables that the folder lacks. Only variables of a pooler may be missing.

    Raises:
        UserError: the weights are missing, damaged, or of another model. Nothing was assigned.
    """
    from tfwd import pretrained
    from tfwd.layers.transformer.formats.published_layer import plan_weights

    missing = "pooler/.*" if encoder.add_pooler else ()
    try:
        plan = plan_weights(encoder, path, allow_missing=missing).apply()
    except (pretrained.PlanError, pretrained.SourceError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"model.pretrained={path}: {reason[:600]}") from error
    return [*plan.missing]
