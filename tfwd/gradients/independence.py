"""Whether the examples of a model's batch are independent, and which rows are whose.

The rules take the first axis of what enters a layer for the examples. A model's own code may have
put them elsewhere, or mixed them. So each model is tried once, on two examples, without a trace:
with only the first one's outputs differentiated, nothing may arrive at the second one's rows.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfwd import substitute
from tfwd.gradients.data import Data
from tfwd.gradients.perturbations import Perturbations
from tfwd.gradients.record import Pass
from tfwd.gradients.terms import Term

# An axis of unknown size, in a trial inside a graph, where there are no values.
UNKNOWN_AXIS = 8


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
        if all(hasattr(t, "numpy") for t in flat):
            found[key] = _try(model, data.part(0, 2).x, training)
        else:
            with tf.init_scope():
                try:
                    found[key] = _try(model, keras.tree.map_structure(_made_up, data.x), training)
                except (tf.errors.OpError, TypeError):
                    found[key] = Verdict()  # made-up values are nothing that it can take
    return found[key]


def _made_up(tensor: Any) -> Any:
    if tensor is None:
        return None
    shape = [2, *(UNKNOWN_AXIS if n is None else n for n in tensor.shape[1:])]
    if tensor.dtype == tf.string:
        return tf.fill(shape, "")
    values = np.random.default_rng(0).normal(size=shape)
    return tf.cast(values if tensor.dtype.is_floating else values > 0, tensor.dtype)


def _try(model: keras.Model, x: Any, training: bool) -> Verdict:
    return substitute.call(lambda: _tried(model, x, training), [], capture=True).outputs


def _tried(model: keras.Model, x: Any, training: bool) -> Verdict:
    perturbations = Perturbations()
    record = Pass(model, perturbations)
    with record.tape:
        outputs = [t for t in keras.tree.flatten(record.run(x, training)) if _is_floating(t)]
        loss = tf.add_n([tf.cast(_wavy(t[:1]), tf.float32) for t in outputs])
    ds = record.tape.gradient(loss, record.probes)
    folded, general, names = set(), set(), {}
    for key, uses in record.uses.items():
        for use in uses:
            given = [ds[probe] for probe in use.probes]
            if any(d is None for d in given):
                continue
            term = use.term(*given)
            if term.batch != 2 and term.batch % 2 == 0:
                folded.add(key)
                term = term.folded(2)
            if term.batch != 2 or not _second_is_zero(term):
                general.add(key)
                names[key] = record.variables[key].path
    if not record.before:
        alone = Pass(model, perturbations, rules=False)
        _check_alone(alone, x, training, outputs, list(names.values()))
    return Verdict(frozenset(folded - general), frozenset(general))


def _check_alone(
    record: Pass, x: Any, training: bool, outputs: list[tf.Tensor], names: list[str]
) -> None:
    """Raises a ValueError if the first example by itself gives something else."""
    first = keras.tree.map_structure(lambda t: None if t is None else t[:1], x)
    alone = [t for t in keras.tree.flatten(record.run(first, training)) if _is_floating(t)]
    for one, both in zip(alone, outputs, strict=True):
        a, b = np.asarray(one, np.float64), np.asarray(both[:1], np.float64)
        rough = 1e-2 if both.dtype.size < 4 else 1e-4
        if a.shape != b.shape or not np.allclose(a, b, rough, rough * (1e-6 + np.abs(b).max())):
            near = f" (what was noticed at {', '.join(names)})" if names else ""
            raise ValueError(
                f"model '{record.model.name}' gives an example another output when another example "
                f"is in the batch{near}: its examples depend on each other, so that there are no "
                "per-example gradients"
            )


def _second_is_zero(term: Term) -> bool:
    whole = float(tf.reduce_max(tf.abs(term.part(0, 2).gradients())))
    second = float(tf.reduce_max(tf.abs(term.part(1, 1).gradients())))
    return second <= 1e-6 * whole


def _is_floating(tensor: Any) -> bool:
    return tf.is_tensor(tensor) and tensor.dtype.is_floating and tensor.shape.rank > 0


def _wavy(tensor: tf.Tensor) -> tf.Tensor:
    """A sum with weights that are all different, so that nothing cancels."""
    flat = tf.reshape(tensor, [-1])
    weights = 1 + tf.sin(tf.cast(tf.range(tf.size(flat)), tf.float32))
    return tf.reduce_sum(flat * tf.cast(weights, flat.dtype))
