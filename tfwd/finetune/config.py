"""Configuration of fine-tuning: the table of its keys, and the values that must fit together.

A config file starts with `default_config()` and changes some keys. See `configs/finetune.py`.
"""

from __future__ import annotations

import ml_collections

from tfwd.runs.errors import UserError
from tfwd.runs.settings.config import Schema
from tfwd.runs.settings.config_keys import OPTIMIZER_KEYS, TRAINING_KEYS, Key, MayChange
from tfwd.runs.settings.validators import (
    COUNT,
    DTYPE_POLICIES,
    FACTOR,
    FLAG,
    NOT_NEGATIVE,
    PATTERNS,
    RATE,
    SEED,
    TEXT,
    WHOLE,
    one_of,
)
from tfwd.runs.training.optimizer import check_arguments

ALWAYS, IN_RUNS = MayChange.ALWAYS, MayChange.IN_RUNS

# Defaults that differ from the language model's: Adam, small rates, few epochs.
_DEFAULTS = {
    "optimizer.name": "adam",
    "optimizer.learning_rate": 5e-5,
    "optimizer.clip_norm": 1.0,
    "training.epochs": 3,
    "training.log_steps": 10,
}

KEYS = {
    "seed": Key(0, SEED, "seed of all random numbers: order, head, masks, noise"),
    "data.path": Key(
        "",
        TEXT,
        "folder with train, valid and test (.tsv, .csv or .jsonl); '': embedded texts",
        ALWAYS,
    ),
    "data.text": Key("text", TEXT, "name of the text column, if columns have names"),
    "data.label": Key("label", TEXT, "name of the label column, if columns have names"),
    "data.train_examples": Key(
        0, WHOLE, "number of training texts, the same for each seed; 0: all"
    ),
    "data.valid_share": Key(
        0.1, RATE, "share of the training texts for validation, if there is no valid file"
    ),
    "data.max_length": Key(
        128, COUNT, "maximum number of tokens per text, including special tokens"
    ),
    "data.batch_size": Key(32, COUNT, "texts per training step"),
    "data.eval_batch_size": Key(
        64, COUNT, "texts per batch in evaluation; does not affect results", ALWAYS
    ),
    "model.pretrained": Key(
        "", TEXT, "folder with config.json, model.safetensors and tokenizer.json", ALWAYS
    ),
    "model.pooling": Key(
        "cls",
        one_of("cls", "pooler", "mean"),
        "input of the head: the first position, the pooler's output, or the mean over the text",
    ),
    "model.dropout": Key(0.1, RATE, "drop rate on the encoder's activations"),
    "model.attention_dropout": Key(0.1, RATE, "drop rate on attention weights"),
    "model.head_dropout": Key(0.1, RATE, "drop rate on the input of the head"),
    "model.freeze_embeddings": Key(False, FLAG, "do not train the encoder's embeddings"),
    "model.freeze_layers": Key(
        0, WHOLE, "number of the encoder's first layers that are not trained"
    ),
    "model.reinitialize_layers": Key(
        0, WHOLE, "number of last layers to reinitialize, together with the pooler"
    ),
    "model.weight_dropout": Key(0.0, RATE, "drop rate on the weights in model.regularized; 0: off"),
    "model.mixout": Key(0.0, RATE, "Mixout rate on the weights in model.regularized; 0: off"),
    "model.noise": Key(
        0.0, NOT_NEGATIVE, "standard deviation of the noise on model.regularized; 0: off"
    ),
    "model.noise_scale": Key(
        "absolute",
        one_of("absolute", "deviation"),
        "noise unscaled, or times the weight's standard deviation",
    ),
    "model.regularized": Key(
        "stack/.*/kernel", PATTERNS, "weights that are dropped, mixed or get noise"
    ),
    "model.whole_inputs": Key(
        False, FLAG, "drop or mix all weights of an input (a kernel row) together"
    ),
    "model.recompute": Key(True, FLAG, "draw masks again in the backward pass, store only seeds"),
    "model.dtype_policy": Key("float32", one_of(*DTYPE_POLICIES), "Keras's dtype policy"),
    **{
        key: row._replace(default=_DEFAULTS.get(key, row.default))
        for key, row in OPTIMIZER_KEYS.items()
    },
    "optimizer.decay_towards": Key(
        "zero", one_of("zero", "start"), "target of weight_decay: 0, or the pretrained weights"
    ),
    "optimizer.warmup": Key(0.1, RATE, "share of steps in which the learning rate rises from 0"),
    "optimizer.schedule": Key(
        "linear",
        one_of("linear", "constant"),
        "after the warm-up the learning rate falls to 0, or is constant",
    ),
    "optimizer.schedule_epochs": Key(0, WHOLE, "epochs of the schedule; 0: training.epochs"),
    "optimizer.layer_decay": Key(
        1.0, FACTOR, "factor of the learning rate from a layer to the layer below; 1: off"
    ),
    **{
        key: row._replace(default=_DEFAULTS.get(key, row.default))
        for key, row in TRAINING_KEYS.items()
    },
    "report.examples": Key(5, WHOLE, "number of test texts in the report, with labels", ALWAYS),
}


def default_config() -> ml_collections.ConfigDict:
    """Returns the configuration with every key at its default; `KEYS` explains the keys.

    Returns:
        A `ConfigDict`, locked except for `optimizer.kwargs`.

    Example:
    >>> config = default_config()
    >>> config.model.pooling = "mean"
    >>> config.optimizer.learning_rate
    5e-05
    """
    return SCHEMA.default()


def _check_together(config: ml_collections.ConfigDict, to_train: bool) -> None:
    model, optimizer = config.model, config.optimizer
    if model.weight_dropout and model.mixout:
        raise UserError(
            f"model.mixout={model.mixout} with model.weight_dropout={model.weight_dropout}: both "
            "replace random weights, with pretrained weights and with 0; give only one of the keys"
        )
    if model.whole_inputs and not (model.weight_dropout or model.mixout):
        raise UserError(
            "model.whole_inputs=True has no effect without model.mixout or model.weight_dropout: "
            "give one of these keys too"
        )
    if optimizer.decay_towards == "start" and not optimizer.weight_decay:
        raise UserError(
            "optimizer.decay_towards=start has no effect without a decay: give "
            "optimizer.weight_decay too"
        )
    if not to_train:
        return
    check_arguments(optimizer)
    if optimizer.layer_decay != 1 and optimizer.name.lower().startswith("tfa."):
        raise UserError(
            f"optimizer.layer_decay={optimizer.layer_decay} with {optimizer.name}, which has one "
            "learning rate for all weights: give an optimizer of keras.optimizers, such as adam"
        )


SCHEMA = Schema(KEYS, _check_together, example="finetune")
