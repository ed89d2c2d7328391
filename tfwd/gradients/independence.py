"""Whether the examples of a model's batch are independent, and which rows are whose.

The rules take the first axis of what enters a layer for the examples. A model's own code may have
put them elsewhere, or mixed them. So each model is tried once, on two examples, without a trace:
with only the first one's outputs differentiated, nothing may arrive at the second one's rows.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras, substitute
from tfwd.gradients.data import Data
from tfwd.gradients.perturbations import Perturbations
from tfwd.gradients.record import Pass
from tfwd.gradients.terms import Term

# What an axis of unknown size is tried as inside a graph, where there are no values.
UNKNOWN_AXES = (8, 3, 2, 1)

# What weights and inputs are changed by in a second trial, where a head that begins at zero, or an
# input of zeros, hides everything before it.
SHIFT = 0.1


class Verdict(NamedTuple):
    """What a trial has shown, by the weights' ids.

    Attributes:
        folded: used where several rows are of one example, one after the other.
        general: used where it does not show whose a row is, so that no rule can be used.
    """

    folded: frozenset[int] = frozenset()
    general: frozenset[int] = frozenset()


_verdicts: weakref.WeakKeyDictionary[Any, dict[Any, Verdict]] = weakref.WeakKeyDictionary()


def verdict(model: keras.Model, data: Data, training: bool) -> Verdict:
    """Tries the model, unless it was tried on such inputs before.

    Raises:
        ValueError: if an example's output depends on another example.
    """
    if isinstance(data.size, int) and data.size == 1:
        return Verdict()
    flat = [t for t in keras.tree.flatten(data.x) if t is not None]
    key = (
        training,
        tuple((tuple(t.shape[1:]), t.dtype) for t in flat),
        tuple(id(v) for v in model.trainable_variables),
    )
    found = _verdicts.setdefault(model, {})
    if key not in found:
        found[key] = _verdict(model, data, flat, training)
    return found[key]


def _verdict(model: keras.Model, data: Data, flat: list[Any], training: bool) -> Verdict:
    """The verdict of the first trial that the model can take."""
    size = data.size if isinstance(data.size, int) else 2
    counts = dict.fromkeys((2, size))  # a stateful layer takes its own number of examples only
    error: Exception | None = None
    if all(hasattr(t, "numpy") for t in flat):
        for count in counts:
            try:
                return _try(model, data.part(0, count).x, training, count)
            except tf.errors.OpError as found:
                error = found
        assert error is not None
        raise error
    for count in counts:
        for axis in UNKNOWN_AXES:
            try:
                return _apart(functools.partial(_try_made_up, model, data.x, training, count, axis))
            except (tf.errors.OpError, TypeError):
                continue
    # Made-up values are nothing that it can take: no rule can be trusted.
    return Verdict(general=frozenset(id(v) for v in model.trainable_variables))


def _apart(function: Callable[[], Verdict]) -> Verdict:
    """Runs a function eagerly while a graph is traced. `tf.init_scope` would stop its tape too."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _try_made_up(model: keras.Model, x: Any, training: bool, count: int, axis: int) -> Verdict:
    made_up = functools.partial(_made_up, count, axis)
    return _try(model, keras.tree.map_structure(made_up, x), training, count)


def _made_up(count: int, axis: int, tensor: Any) -> Any:
    if tensor is None:
        return None
    shape = [count, *(axis if n is None else n for n in tensor.shape[1:])]
    if tensor.dtype == tf.string:
        return tf.fill(shape, "")
    values = np.random.default_rng(0).normal(size=shape)
    return tf.cast(values if tensor.dtype.is_floating else values > 0, tensor.dtype)


def _try(model: keras.Model, x: Any, training: bool, count: int) -> Verdict:
    def trial() -> Verdict:
        perturbations = Perturbations()
        record = Pass(model, perturbations)
        outputs, found, hidden, names = _traced(record, x, training, count)
        _check_normalizations(model, record)
        if not record.before:
            alone = Pass(model, perturbations, rules=False)
            _check_alone(alone, x, training, outputs, names)
        if hidden:
            moved = keras.tree.map_structure(
                functools.partial(_shifted, np.random.default_rng(0)), x
            )
            record = Pass(model, Perturbations(), values=_shifted_weights(model))
            _, more, _, _ = _traced(record, moved, training, count)
            found = Verdict(found.folded | more.folded, found.general | more.general)
        return Verdict(found.folded - found.general, found.general)

    return substitute.call(trial, [], capture=True).outputs


def _traced(
    record: Pass, x: Any, training: bool, count: int
) -> tuple[list[tf.Tensor], Verdict, bool, list[str]]:
    """The outputs, where gradients of the first one's arrive, whether some were zero or not finite
    everywhere, so that they show nothing, and the paths of weights where others' rows are met."""
    with record.tape:
        outputs = [t for t in keras.tree.flatten(record.run(x, training)) if _is_floating(t)]
        loss = tf.add_n([tf.cast(_wavy(t[:1]), tf.float32) for t in outputs])
    ds = record.tape.gradient(loss, record.probes)
    folded, general, names, hidden = set(), set(), {}, False
    for key, uses in record.uses.items():
        for use in uses:
            given = [ds[probe] for probe in use.probes]
            if any(d is None for d in given):
                continue
            term = use.term(*given)
            if term.batch != count and term.batch % count == 0:
                folded.add(key)
                term = term.folded(count)
            shown = term.batch != count or _others_are_zero(term, count)
            if shown is None:
                hidden = True
            elif term.batch != count or not shown:
                general.add(key)
                names[key] = record.variables[key].path
    return outputs, Verdict(frozenset(folded), frozenset(general)), hidden, list(names.values())


def _shifted_weights(model: keras.Model) -> dict[int, tf.Tensor]:
    random = np.random.default_rng(1)
    found = {}
    for variable in model.trainable_variables:
        value = _keras.value(variable)
        noise = tf.cast(SHIFT * random.normal(size=variable.shape), value.dtype)
        found[id(variable)] = tf.where(tf.math.is_finite(value), value, 0) + noise
    return found


def _shifted(random: np.random.Generator, tensor: Any) -> Any:
    """Inputs that are not zero, nor NaN, for the same reason."""
    if not isinstance(tensor, tf.Tensor) or not tensor.dtype.is_floating:
        return tensor
    noise = tf.cast(SHIFT * random.uniform(0.5, 1.5, size=tensor.shape), tensor.dtype)
    moved = tf.where(tf.math.is_finite(tensor), tensor, 0) + noise
    mask = _keras.get_mask(tensor)
    if mask is not None:
        _keras.set_mask(moved, mask)
    return moved


def _check_normalizations(model: keras.Model, record: Pass) -> None:
    """Raises a ValueError if a BatchNormalization was called with training=True by the model."""
    for layer in _keras.all_layers(model):
        if isinstance(layer, keras.layers.BatchNormalization) and any(
            id(v) in record.before for v in layer.non_trainable_variables
        ):
            raise ValueError(
                f"layer '{layer.name}' of type {type(layer).__name__} is called by the model with "
                "training=True, and normalizes over the batch, so that its examples depend on each "
                "other"
            )


def _check_alone(
    record: Pass, x: Any, training: bool, outputs: list[tf.Tensor], names: list[str]
) -> None:
    """Raises a ValueError if the first example by itself gives something else."""
    first = keras.tree.map_structure(lambda t: None if t is None else t[:1], x)
    alone = [t for t in keras.tree.flatten(record.run(first, training)) if _is_floating(t)]
    for one, both in zip(alone, outputs, strict=True):
        a, b = np.asarray(one, np.float64), np.asarray(both[:1], np.float64)
        rough = 1e-2 if both.dtype.size < 4 else 1e-4
        scale = np.abs(b[np.isfinite(b)]).max(initial=1e-6)
        if a.shape != b.shape or not np.allclose(a, b, rough, rough * scale, equal_nan=True):
            near = f" (what was noticed at {', '.join(names)})" if names else ""
            raise ValueError(
                f"model '{record.model.name}' gives an example another output when another example "
                f"is in the batch{near}: its examples depend on each other, so that there are no "
                "per-example gradients; or it draws random numbers otherwise than by keras.random"
            )


def _others_are_zero(term: Term, count: int) -> bool | None:
    """Whether the first example's gradient is in its own rows alone; None if there is none."""
    whole = float(tf.reduce_max(tf.abs(term.part(0, count).gradients())))
    others = float(tf.reduce_max(tf.abs(term.part(1, count - 1).gradients())))
    return others <= 1e-6 * whole if 0 < whole < math.inf else None


def _is_floating(tensor: Any) -> bool:
    return tf.is_tensor(tensor) and tensor.dtype.is_floating and tensor.shape.rank > 0


def _wavy(tensor: tf.Tensor) -> tf.Tensor:
    """A sum with weights that are all different, so that nothing cancels."""
    flat = tf.reshape(tensor, [-1])
    weights = 1 + tf.sin(tf.cast(tf.range(tf.size(flat)), tf.float32))
    return tf.reduce_sum(flat * tf.cast(weights, flat.dtype))
