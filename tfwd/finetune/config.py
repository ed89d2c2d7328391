"""Configuration of fine-tuning: the table of its keys, and the values that must fit together.

A config file starts with `default_config()` and changes some keys, as `configs/finetune.py` does.
"""

from __future__ import annotations

import ml_collections

from tfwd.runs.errors import UserError
from tfwd.runs.settings.config import Schema
from tfwd.runs.settings.keys import OPTIMIZER_KEYS, TRAINING_KEYS, Key, MayChange
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
    "seed": Key(0, SEED, "of everything that is random: order, head, masks, noise"),
    "data.path": Key(
        "",
        TEXT,
        "folder of train, valid and test, each .tsv, .csv or .jsonl; '': embedded",
        ALWAYS,
    ),
    "data.text": Key("text", TEXT, "name of the column of texts, where columns have names"),
    "data.label": Key("label", TEXT, "name of the column of labels, where columns have names"),
    "data.train_examples": Key(0, WHOLE, "so many of them, the same for each seed; 0: all"),
    "data.valid_share": Key(0.1, RATE, "of train that is valid, where there is no such file"),
    "data.max_length": Key(128, COUNT, "tokens of a text, with the tokenizer's own; more are cut"),
    "data.batch_size": Key(32, COUNT, "texts of a training step"),
    "data.eval_batch_size": Key(
        64, COUNT, "texts at a time in evaluation; no influence on results", ALWAYS
    ),
    "model.pretrained": Key(
        "", TEXT, "folder with config.json, model.safetensors and tokenizer.json", ALWAYS
    ),
    "model.pooling": Key(
        "cls",
        one_of("cls", "pooler", "mean"),
        "what the head reads: the first place, the pooler's output, or the mean over the text",
    ),
    "model.dropout": Key(0.1, RATE, "on the encoder's activations"),
    "model.attention_dropout": Key(0.1, RATE, "on attention weights"),
    "model.head_dropout": Key(0.1, RATE, "on what the head reads"),
    "model.freeze_embeddings": Key(False, FLAG, "do not train the encoder's embeddings"),
    "model.freeze_layers": Key(0, WHOLE, "do not train so many of the encoder's first layers"),
    "model.reinitialize_layers": Key(
        0, WHOLE, "begin so many of the last layers, and the pooler, anew"
    ),
    "model.weight_dropout": Key(0.0, RATE, "on the weights below, towards 0; 0: off"),
    "model.mixout": Key(0.0, RATE, "on the weights below, towards the pretrained; 0: off"),
    "model.noise": Key(0.0, NOT_NEGATIVE, "deviation of the noise on the weights below; 0: off"),
    "model.noise_scale": Key(
        "absolute",
        one_of("absolute", "deviation"),
        "noise as it is, or times the weight's own deviation",
    ),
    "model.regularized": Key(
        "stack/.*/kernel", PATTERNS, "weights that are dropped, mixed or have noise"
    ),
    "model.whole_inputs": Key(
        False, FLAG, "drop, or mix, all weights of an input of a kernel at once"
    ),
    "model.recompute": Key(True, FLAG, "draw masks again in the backward pass, keep only seeds"),
    "model.dtype_policy": Key("float32", one_of(*DTYPE_POLICIES), "Keras's dtype policy"),
    **{
        key: row._replace(default=_DEFAULTS.get(key, row.default))
        for key, row in OPTIMIZER_KEYS.items()
    },
    "optimizer.decay_towards": Key(
        "zero", one_of("zero", "start"), "what weight_decay pulls to: 0, or the pretrained weights"
    ),
    "optimizer.warmup": Key(0.1, RATE, "share of the steps in which the rate rises from 0"),
    "optimizer.schedule": Key(
        "linear", one_of("linear", "constant"), "after that the rate falls to 0, or stays"
    ),
    "optimizer.schedule_epochs": Key(
        0, WHOLE, "epochs that the schedule is made for; 0: training.epochs"
    ),
    "optimizer.layer_decay": Key(
        1.0, FACTOR, "times the rate from each layer to the one below it; 1: off"
    ),
    **{
        key: row._replace(default=_DEFAULTS.get(key, row.default))
        for key, row in TRAINING_KEYS.items()
    },
    "report.examples": Key(5, WHOLE, "texts of the test file that are shown with labels", ALWAYS),
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
            "replace a weight at random, by the pretrained one and by 0; give one of them"
        )
    if model.whole_inputs and not (model.weight_dropout or model.mixout):
        raise UserError(
            "model.whole_inputs=True is of no use without model.mixout or model.weight_dropout: "
            "give one of them too"
        )
    if optimizer.decay_towards == "start" and not optimizer.weight_decay:
        raise UserError(
            "optimizer.decay_towards=start is of no use without a decay: give "
            "optimizer.weight_decay too"
        )
    if not to_train:
        return
    check_arguments(optimizer)
    if optimizer.layer_decay != 1 and optimizer.name.lower().startswith("tfa."):
        raise UserError(
            f"optimizer.layer_decay={optimizer.layer_decay} with {optimizer.name}, which has one "
            "learning rate for all weights: give an optimizer of keras.optimizers, as adam"
        )


SCHEMA = Schema(KEYS, _check_together, example="configs/finetune.py")
