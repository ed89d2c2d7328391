"""Diagnosis of a step that was not finite: repeats it and examines every tensor.

The step is repeated on the same batch with the same draws, by a separate function in the same mode
(eager, graph, XLA, replicas). It is then undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd._graph.tentative_assignments import Tentative, replica_parts
from tfwd._keras import losses as _keras_losses
from tfwd._keras import training as _keras_training
from tfwd.finite import all_finite, can_be_non_finite
from tfwd.numerics.bad_step_report import Report
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.likely_causes import likely_causes
from tfwd.numerics.causes.loss_rows import parts
from tfwd.numerics.causes.losses_by_output import loss_name
from tfwd.numerics.checked_step import CheckedStep, assign_all, tracked
from tfwd.numerics.checked_tensors import Frame, named, stored_values
from tfwd.numerics.non_finite_variables import non_finite_slots
from tfwd.numerics.tensor_measurements import (
    Detail,
    Measurement,
    measure_tensor,
    of_argument,
    of_states,
)

NOT_SHOWN = ("data", "prediction")  # data are added separately


class Diagnosis:
    """Diagnosis of steps of a compiled model. It does not change the model.

    Args:
        model: the compiled model.
        shown: int. Number of frames that a report shows before the first non-finite one.
        ignores: function that returns True for frames to ignore.
    """

    def __init__(
        self,
        model: keras.Model,
        shown: int = 20,
        ignores: Callable[[Frame], bool] = lambda frame: False,
    ):
        self._model, self._shown = model, shown
        self._ignores = ignores
        self._step = CheckedStep(model, _measure, ignores=ignores)
        self._indices: tuple[str, ...] | None = None  # which data are indices: "x", "y", or both

    def __call__(
        self,
        data: Any,
        step: int,
        history: Sequence[Mapping[str, float]] = (),
        is_first: bool | None = False,
    ) -> Report:
        """Returns the report on a step. The model must be in its state before the step.

        Args:
            data: the batch.
            step: int. The step's number, from 1.
            history: the extents of gradients and loss in earlier steps, by path, and their numbers.
            is_first: bool. True if the step is the first one; `None` after an unchecked step.
        """
        model = self._model
        slots = [
            Measurement(
                Frame("weight", _keras.variables.path(variable)),
                measure_tensor(_keras.variables.value(variable)).numbers(),
            )
            for variable in non_finite_slots(model)
        ]
        replicas = self._replicas(data)
        for measured in replicas:
            start = _first_computed(measured)
            measured[start:start] = slots
        # The replica where NaN or infinity began. Its gradients carry them to other replicas.
        firsts = [
            next((i for i, one in enumerate(found) if not one.is_finite), len(found))
            for found in replicas
        ]
        number = firsts.index(min(firsts))
        found = replicas[number]
        tensors = _tensors(model, data, number)
        arrays, losses = _arrays(tensors), _losses(model)
        predictions = [one for one in found if one.frame.kind == "prediction"]
        named = losses if predictions else []  # a custom step may compute another loss
        of_data = [
            _with_rows(x, tensors.get(x.frame.name)) for x in found if x.frame.kind == "data"
        ]
        evidence = Evidence(
            [
                *_with_integers(of_data, arrays),
                *(_with_name(one, named) for one in found if one.frame.kind not in NOT_SHOWN),
            ],
            arrays,
            predictions,
            history,
            model,
            " ".join(losses),
            is_first,
        )
        with Tentative() as kept:  # a loss may have variables, which its calls change
            evidence = _attributed(evidence)
            causes = likely_causes(evidence)
        assign_all(kept.before(all_known=True))
        replica = number if len(replicas) > 1 else None
        return Report(step, evidence.found, causes, replica, self._shown)

    def has_bad_indices(self, data: Any) -> bool:
        """Returns True if class labels, or numbers for an `Embedding`, are not finite.

        A step would fail if it converts them to integers, and metrics may have changed before. XLA
        raises no error, so False is returned. It is also returned for several workers, which would
        have to decide together.
        """
        if self._indices is None:
            layers = _keras.layers.all_layers(self._model)
            takes_ids = any(isinstance(layer, keras.layers.Embedding) for layer in layers)
            takes_classes = "sparse" in " ".join(_losses(self._model, types=True)).lower()
            self._indices = ("x",) * takes_ids + ("y",) * takes_classes
        together = _keras.has_workers(self._model.distribute_strategy)
        if not self._indices or together or self._model.jit_compile:
            return False
        return not self.data_are_finite(data, self._indices)

    def data_are_finite(self, data: Any, prefixes: tuple[str, ...] = ("",)) -> bool:
        """Returns True if a batch is finite, except what is ignored.

        Args:
            data: The batch.
            prefixes: Beginnings of the names of the tensors to check. Default all.
        """
        given = [
            tensor
            for found in self._data(data)
            for name, tensor in found.items()
            if name.startswith(prefixes)
        ]
        return bool(all_finite(given))

    def _replicas(self, data: Any) -> list[list[Measurement]]:
        """Measures all tensors of a step, on each replica.

        Only the data are measured if an operation refuses them. The step has then ended before it
        is undone, so it is undone here.
        """
        if self.has_bad_indices(data):
            return self._replicas_of_data(data)
        parts = [part for variable in tracked(self._model) for part in replica_parts(variable)]
        before = [(part, part.read_value()) for part in parts]
        try:
            outcome = self._step(data)
        except BaseException as error:
            assign_all(before)
            if not isinstance(error, tf.errors.InvalidArgumentError) or self.data_are_finite(data):
                raise
            return self._replicas_of_data(data)
        return [
            [
                Measurement(frame, detail.numbers())
                for frame, detail in zip(outcome.frames, found, strict=True)
            ]
            for found in outcome.found
        ]

    def _replicas_of_data(self, data: Any) -> list[list[Measurement]]:
        return [
            [
                Measurement(
                    Frame("data", name, dtype=values.dtype.name), measure_tensor(values).numbers()
                )
                for name, values in found.items()
            ]
            for found in self._data(data)
        ]

    def _data(self, data: Any) -> list[dict[str, tf.Tensor]]:
        """Returns the tensors of a batch that are checked, by name, for each replica."""
        replicas = range(self._model.distribute_strategy.num_replicas_in_sync)
        return [
            {
                name: values
                for name, tensor in _tensors(self._model, data, replica).items()
                if can_be_non_finite(values := stored_values(tensor))
                and not self._ignores(Frame("data", name))
            }
            for replica in replicas
        ]


def _first_computed(found: list[Measurement]) -> int:
    """Returns the number of measurements of data and weights, which are before all others."""
    kinds = [one.frame.kind for one in found]
    return next((i for i, kind in enumerate(kinds) if kind not in ("data", "weight")), len(kinds))


def _measure(frame: Frame, tensor: Any, sequence: Any) -> Detail:
    detail = measure_tensor(tensor)
    if frame.kind == "argument":
        return of_argument(detail, sequence)
    if frame.kind == "prediction":  # the loss is computed again from it, row by row
        detail = detail._replace(values=tensor)
    if frame.kind == "output" and frame.has_time:
        detail = of_states(detail, tensor if sequence is None else sequence)
    return detail


def _tensors(model: keras.Model, data: Any, replica: int) -> dict[str, Any]:
    """Returns the tensors of a replica's part of the batch, by name."""
    parts = keras.utils.unpack_x_y_sample_weight(_keras_training.batch(data))
    local = model.distribute_strategy.experimental_local_results
    return {
        name: local(value)[replica]
        for prefix, part in zip(("x", "y", "sample_weight"), parts, strict=True)
        for name, value in named(prefix, part)
    }


def _arrays(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the dense tensors as arrays, and the ragged tensors filled with zeros."""
    arrays = {}
    for name, tensor in tensors.items():
        dense = tensor.to_tensor() if isinstance(tensor, tf.RaggedTensor) else tensor
        if isinstance(dense, tf.Tensor):
            arrays[name] = dense.numpy()
    return arrays


def _with_rows(found: Measurement, tensor: Any) -> Measurement:
    """Sets the rows of a ragged or sparse tensor, whose stored values were measured."""
    if isinstance(tensor, tf.RaggedTensor):
        bad = [not np.isfinite(stored_values(row)).all() for row in tensor]
        rows = np.asarray(bad, bool)
    elif isinstance(tensor, tf.SparseTensor):
        numbers = tensor.indices.numpy()[~np.isfinite(tensor.values), 0]
        rows = np.bincount(numbers, minlength=tensor.shape[0]) > 0
    else:
        return found
    none = np.zeros(0, bool)
    detail = found.detail._replace(rows=rows, steps=none, columns=none)
    return Measurement(found.frame, detail)


def _with_integers(found: list[Measurement], arrays: dict[str, np.ndarray]) -> list[Measurement]:
    """Adds integers and booleans of a batch, which are always finite, to its measurements."""
    known = {one.frame.name: one for one in found}
    for name, values in arrays.items():
        if name not in known and (values.dtype == bool or np.issubdtype(values.dtype, np.integer)):
            detail = measure_tensor(tf.constant(values, tf.float64)).numbers()
            frame = Frame("data", name, dtype=values.dtype.name, origins=(name,))
            known[name] = Measurement(frame, detail)
    return [*(known.pop(name) for name in arrays if name in known), *known.values()]


def _with_name(found: Measurement, losses: list[str]) -> Measurement:
    if found.frame.kind != "loss":
        return found
    return Measurement(found.frame._replace(source=tuple(losses)), found.detail)


def _attributed(evidence: Evidence) -> Evidence:
    """Names the outputs whose loss is not finite, if the model has several outputs."""
    found = list(evidence.found)
    at = next((i for i, one in enumerate(found) if not one.is_finite), None)
    if at is None or found[at].frame.kind != "loss":
        return evidence
    several = parts(evidence)
    if not several:
        return evidence
    frame = found[at].frame._replace(
        source=tuple(part.loss for part in several), outputs=tuple(part.output for part in several)
    )
    found[at] = found[at]._replace(frame=frame)
    named = [
        part._replace(found=[*found[:at], _of_part(found[at], part), *found[at + 1 :]])
        for part in several
    ]
    return evidence._replace(found=found, parts=named)


def _of_part(loss: Measurement, part: Evidence) -> Measurement:
    return loss._replace(frame=loss.frame._replace(source=(part.loss,), outputs=(part.output,)))


def _losses(model: keras.Model, *, types: bool = False) -> list[str]:
    """Returns the names of the compiled losses, and of their types if `types` is True."""
    compiled = tf.nest.flatten(_keras_losses.compiled_loss(model)[0])
    losses = [one for one in compiled if one is not None]
    return [*map(loss_name, losses), *(type(one).__name__ for one in losses * types)]
