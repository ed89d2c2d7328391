"""Makes the optimizer that a config names, with weight decay, averaging and loss scaling."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import ml_collections
import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd.optimizers import DecoupledWeightDecay, NonMonotonicASGD
from tfwd.runs.errors import UserError, suggest
from tfwd.runs.settings.validators import Validator, hint, multipliers, patterns, same_kind, shown

# Optimizers of tensorflow-addons, which only Keras 2 has, and the most similar optimizers of Keras.
ADDONS = {
    "tfa.AdaBelief": ("Adam", "AdamW"),
    "tfa.COCOB": ("Adam",),
    "tfa.ConditionalGradient": ("SGD",),
    "tfa.LAMB": ("Lamb",),
    "tfa.LazyAdam": ("Adam",),
    "tfa.NovoGrad": ("Adam", "AdamW"),
    "tfa.RectifiedAdam": ("Adam", "AdamW"),
    "tfa.Yogi": ("Adam", "AdamW"),
}


def optimizer_names() -> dict[str, str]:
    """Returns the names of the known optimizers, by their lower-case names."""
    from tfwd._keras import (
        training as _keras_training,  # slow to load, and `--help` does not need it
    )

    return {name.lower(): name for name in _keras_training.optimizer_names()}


def optimizer_class(name: str) -> type:
    """Returns the optimizer class of a name, in upper or lower case."""
    from tfwd._keras import training as _keras_training

    return _keras_training.optimizer_class(optimizer_names()[name.lower()])


def allowed_arguments(optimizer: str) -> dict[str, Any]:
    """Returns the arguments that `optimizer.kwargs` may set, with their defaults."""
    # Config keys of tfwd set the rate, the decay and the clipping.
    excluded = ("self", "kwargs", "learning_rate", "weight_decay", "global_clipnorm")
    parameters = inspect.signature(optimizer_class(optimizer)).parameters
    return {name: p.default for name, p in parameters.items() if name not in excluded}


def check_arguments(optimizer: ml_collections.ConfigDict) -> None:
    """Checks that the optimizer takes each argument in `optimizer.kwargs`.

    Raises:
        UserError: the optimizer has no such argument, or the value has the wrong type.
    """
    name = optimizer.name
    for argument, value in optimizer.kwargs.items():
        allowed = allowed_arguments(name)
        if argument not in allowed:
            near = suggest(argument, allowed)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(allowed)}"
            raise UserError(f"optimizer.kwargs.{argument}: {name} has no such argument; {hint}")
        expected = same_kind(value, allowed[argument])
        if expected:
            raise UserError(f"optimizer.kwargs.{argument}={shown(value)}: {name} takes {expected}")


def nonzero_defaults(optimizer: type) -> dict[str, Any]:
    """Returns the arguments of an optimizer class whose default is neither None nor zero."""
    parameters = inspect.signature(optimizer).parameters.values()
    return {p.name: p.default for p in parameters if p.default and p.default is not p.empty}


def _optimizer_hint(value: Any) -> str:
    """Returns a hint: how to install tensorflow-addons, and the most similar optimizer of Keras."""
    available = optimizer_names()
    known = {name.lower(): name for name in ADDONS}
    if not isinstance(value, str) or value.lower() not in known:
        return hint(value, available)
    name = known[value.lower()]
    similar = [other for other in ADDONS[name] if other.lower() in available]
    instead = f"; the most similar optimizer here is {' or '.join(similar)}" if similar else ""
    return (
        f" ({name} needs tensorflow-addons: in a checkout of tfwd, pip install '.[addons]' on "
        f"Python 3.10 or 3.11{instead})"
    )


OPTIMIZER = Validator(
    "an optimizer of keras.optimizers, such as sgd, adam, adamw, rmsprop",
    lambda v: isinstance(v, str) and v.lower() in optimizer_names(),
    _optimizer_hint,
)


def make_optimizer(
    name: str,
    learning_rate: float,
    *,
    weight_decay: float = 0.0,
    decay_scale: str = "learning_rate",
    decay_include: str = "",
    decay_exclude: str = "",
    decay_multipliers: str = "",
    decay_sparse: str = "table",
    decay_unused: bool = False,
    decay_towards: str = "zero",
    non_monotone_interval: int = 0,
    kwargs: dict[str, Any] | None = None,
    dtype_policy: str = "float32",
) -> keras.optimizers.Optimizer:
    """Makes an optimizer of Keras or tensorflow-addons, with the requested decay and averaging.

    Args:
        name: str. The class name, in upper or lower case: "sgd", "Adam", or "tfa.LAMB" with
            tensorflow-addons.
        learning_rate: float. The base rate. The training step assigns to it.
        weight_decay: float. The decay of `DecoupledWeightDecay`; 0 disables it. It replaces the
            optimizer's own decay, such as in AdamW.
        decay_scale, decay_sparse, decay_unused: as `scale`, `sparse` and `decay_unused` of
            `DecoupledWeightDecay`.
        decay_towards: "zero", or "start" for the values of the weights at their first update.
        decay_include, decay_exclude: str. Patterns of `DecoupledWeightDecay`, separated by spaces;
            "" for `None`.
        decay_multipliers: str. pattern=factor, separated by spaces.
        non_monotone_interval: int. The interval of `NonMonotonicASGD`; 0 disables averaging.
        kwargs: further arguments of the class (momentum, beta_1, ...).
        dtype_policy: with "mixed_float16" the optimizer is wrapped to scale the loss.

    Returns:
        The optimizer, without slots yet. The loss scaler wraps the averaging optimizer, which wraps
        the decaying optimizer.

    Raises:
        UserError: there is no such optimizer, or it does not take the arguments.

    Example:
    >>> make_optimizer("sgd", 0.5, kwargs={"momentum": 0.9}).momentum
    0.9
    >>> make_optimizer("sgd", 0.5, weight_decay=1e-6, decay_exclude="bias").exclude
    ['bias']
    """
    if not OPTIMIZER.is_valid(name):
        raise UserError(f"optimizer.name={name!r}: give {OPTIMIZER.expected}{OPTIMIZER.hint(name)}")
    kind = optimizer_class(name)
    arguments = {**_arguments_without_decay(kind), **(kwargs or {})}
    has_rate = "learning_rate" in inspect.signature(kind).parameters  # COCOB has no learning rate
    chosen = {"include": decay_include, "exclude": decay_exclude, "multipliers": decay_multipliers}
    for key, given in chosen.items():
        if given and not weight_decay:
            raise UserError(
                f"optimizer.decay_{key}={given!r} has no effect without a decay: give "
                "optimizer.weight_decay too"
            )
    rate = {"learning_rate": learning_rate} if has_rate else {}
    if kwargs:
        _check_one_step(lambda: kind(**rate, **arguments), f"optimizer.kwargs of {name}, {kwargs}")
    try:
        optimizer = kind(**rate, **arguments)
        if weight_decay:
            optimizer = DecoupledWeightDecay(
                optimizer,
                weight_decay,
                scale=decay_scale,
                include=patterns(decay_include) or None,
                exclude=patterns(decay_exclude) or None,
                multipliers=multipliers(decay_multipliers) or None,
                sparse=decay_sparse,
                decay_unused=decay_unused,
                towards=decay_towards,
                sum_repeated_rows=False,  # the step sums them, before it computes the norm
            )
        if non_monotone_interval:
            optimizer = NonMonotonicASGD(optimizer, non_monotone_interval, sum_repeated_rows=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer {name} with {arguments}: {error}") from error
    if dtype_policy == "mixed_float16":
        from tfwd._keras import training as _keras_training

        optimizer = _keras_training.with_loss_scale(optimizer)
    return optimizer


def optimizer_and_options(
    config: ml_collections.ConfigDict, model: keras.Model, own: Sequence[str] = ()
) -> tuple[keras.optimizers.Optimizer, dict[str, Any]]:
    """Returns the optimizer of a configuration, and the further arguments of `TrainStep`.

    Args:
        config: the whole configuration.
        model: the model. The patterns of the decay must match its weights.
        own: names under `optimizer.` that the program's own step reads. They are ignored here.

    Raises:
        UserError: the optimizer does not take its arguments, or a pattern matches no weight.
    """
    optimizer = {k: v for k, v in config.optimizer.to_dict().items() if k not in own}
    rate, clip_norm, l2, steps_per_update = (
        optimizer.pop(key) for key in ("learning_rate", "clip_norm", "l2", "steps_per_update")
    )
    if steps_per_update > 1 and optimizer["decay_sparse"] == "rows":
        raise UserError(
            f"optimizer.steps_per_update={steps_per_update} with optimizer.decay_sparse=rows: the "
            "mean of several gradients has all rows; give decay_sparse=table"
        )
    made = make_optimizer(
        optimizer.pop("name"), rate, dtype_policy=config.model.dtype_policy, **optimizer
    )
    try:
        decay = find_weight_decay(made)
        if decay is not None:
            decay.decay_table(model)
    except ValueError as error:
        raise UserError(f"optimizer.decay_{error}".replace("DecoupledWeightDecay: ", "")) from error
    options = {
        "clip_norm": clip_norm,
        "l2": l2,
        "sparse": optimizer["decay_sparse"] == "rows",
        "checked": config.numerics.check != "off",
        "whole": config.numerics.whole,
        "steps_per_update": steps_per_update,
    }
    return made, options


def _check_one_step(make: Callable[[], keras.optimizers.Optimizer], what: str) -> None:
    """Makes one step on one weight, because Keras checks most arguments only when they are used.

    Raises:
        UserError: the step fails, or the weight is not finite afterwards.
    """
    try:
        weight = keras.Variable([1.0]) if _keras.GENERATION == 3 else tf.Variable([1.0])
        make().apply_gradients([(tf.constant([1.0]), weight)])
        found = float(np.asarray(_keras.variables.value(weight))[0])
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{what}: {reason}; give other arguments") from error
    if not math.isfinite(found):
        raise UserError(f"{what}: a step changes a weight from 1 to {found}; give other arguments")


def find_averaging(optimizer: keras.optimizers.Optimizer) -> NonMonotonicASGD | None:
    """Returns the `NonMonotonicASGD` inside an optimizer from `make_optimizer`, or `None`."""
    return _find_wrapped(optimizer, NonMonotonicASGD)


def find_weight_decay(optimizer: keras.optimizers.Optimizer) -> DecoupledWeightDecay | None:
    """Returns the `DecoupledWeightDecay` inside an optimizer from `make_optimizer`, or `None`."""
    return _find_wrapped(optimizer, DecoupledWeightDecay)


def _find_wrapped(optimizer: Any, kind: type) -> Any:
    held = _keras.wrapped_optimizers.chain(optimizer)
    return next((found for found in held if isinstance(found, kind)), None)


def has_own_decay(name: str) -> bool:
    """Returns True if the optimizer of this name decays weights by default."""
    return bool(_arguments_without_decay(optimizer_class(name)))


def _arguments_without_decay(kind: type) -> dict[str, float]:
    """Returns the arguments that switch off an optimizer's default decay."""
    return {name: 0.0 for name in nonzero_defaults(kind) if name.endswith("weight_decay")}
