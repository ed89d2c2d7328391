"""Report on a step that is not finite: a sentence, a table, causes, and advice."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tfwd.numerics.checked_tensors import BACKWARD, KINDS
from tfwd.numerics.tensor_measurements import Detail, Measurement

WIDTH = 100
COUNTED = "Rows, columns and time steps are counted from 0; steps, epochs and batches from 1."
SCALARS = ("added loss", "loss", "loss scale", "learning rate")
AGAIN = (
    " With fit(shuffle=False) on one replica, without steps_per_epoch, row r of batch b is example "
    "(b - 1) * batch_size + r of an array."
)


class Cause(NamedTuple):
    """Likely cause of a bad step.

    Attributes:
        name: str. The title of its section in `docs/non_finite.md`. For NaN in the data, the name
            tells the data: "NaN or infinity in the input".
        evidence: str. The observations that support it.
        advice: str. What to do.
    """

    name: str
    evidence: str
    advice: str


class Report:
    """Report on a training step that was not finite.

    Attributes:
        step: int. The step's number in the training, from 1.
        found: the measurement of each tensor, in the order of computation.
        causes: the likely causes, the best supported one first.
        replica: int. The first non-finite replica; `None` if there is only one.
        worker: int. The first worker that found a non-finite tensor; `None` without workers.
        history: int. Number of frames shown before the first non-finite one.
        note: str. A further remark.
        place: str. The position in the training, for example "epoch 2, batch 9".

    `str(report)` is the text, with at most 100 columns.
    """

    def __init__(
        self,
        step: int,
        found: Sequence[Measurement],
        causes: Sequence[Cause] = (),
        replica: int | None = None,
        history: int = 20,
        note: str = "",
        place: str = "",
    ):
        self.step, self.replica, self.history, self.note = step, replica, history, note
        self.place = place
        self.worker: int | None = None
        # The sort is stable: tensors of one kind stay in the order of computation.
        ahead = ("data", "weight")
        self.found = sorted(
            (one for one in found if one.frame.kind != "argument" or not one.is_finite),
            key=lambda one: KINDS.index(one.frame.kind) if one.frame.kind in ahead else len(KINDS),
        )
        self.causes = list(causes)

    @property
    def offenders(self) -> list[Measurement]:
        """Returns the non-finite frames, in the order of computation."""
        return [one for one in self.found if not one.is_finite]

    @property
    def first(self) -> Measurement | None:
        """Returns the first non-finite frame; `None` if all checked tensors are finite."""
        return next(iter(self.offenders), None)

    @property
    def sentence(self) -> str:
        """Returns the first line: which tensor, where, how many elements, and which step."""
        when = f"step {self.step}"
        if self.replica is not None:
            when += f", replica {self.replica}"
        if self.worker is not None:
            when += f", worker {self.worker}"
        if self.place:
            when += f" ({self.place})"
        first = self.first
        if first is None:
            return f"all checked tensors are finite: {len(self.found)} tensors, {when}"
        return f"{describe(first)}, {when}"

    @property
    def what(self) -> str:
        """Returns the first line without the step."""
        return "all checked tensors are finite" if self.first is None else describe(self.first)

    @property
    def where(self) -> str:
        """Returns the position of the first non-finite tensor, for example `layer dense_2`."""
        first = self.first
        if first is None:
            return "an unknown position"
        kind, name = first.frame.kind, first.frame.name
        if kind == "gradient" and len(first.frame.source) > 1:
            return f"layers {' and '.join(first.frame.source)}"
        if kind == "gradient" and first.frame.source:
            (name,) = first.frame.source
        if kind in ("loss", "loss scale", "learning rate"):
            return f"the {kind}"
        return f"{'layer' if first.frame.layer else 'weight' if 'weight' in kind else kind} {name}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as numbers, texts, lists and dicts, for JSON."""
        return {
            "step": self.step,
            "replica": self.replica,
            "worker": self.worker,
            "place": self.place,
            "sentence": self.sentence,
            "frames": [
                {
                    "kind": one.frame.kind,
                    "direction": one.frame.direction,
                    "name": one.frame.name,
                    "layer": one.frame.layer,
                    "call": one.frame.call,
                    "dtype": one.frame.dtype,
                    **one.detail.summary._asdict(),
                }
                for one in self.found
            ],
            "causes": [cause._asdict() for cause in self.causes],
            "note": self.note,
        }

    def __str__(self) -> str:
        parts = [_filled(self.sentence)]
        parts += self._table()
        parts += self._advice()
        return "\n".join(parts)

    def _table(self) -> list[str]:
        first = self.first
        end = len(self.found) if first is None else self.found.index(first) + 1
        start = max(0, end - 1 - self.history) if first else 0
        data = [one for one in self.found[:start] if one.frame.kind == "data"]
        shown = self.found[start:end]
        others = [
            one for one in self.found[end:] if one.frame.direction != "update" and not one.is_finite
        ]
        which = "the last frames" if first else "all frames"
        heads = "  abs min   abs max     zeros  non-finite"
        lines = ["", f"{heads}  {which}, in the order of computation"]
        lines += [_row(one) for one in data]
        if start > len(data):
            lines.append(f"{'...':>9}")
        lines += [_row(one) for one in shown]
        scales = [one for one in self.found if one.frame.kind == "loss scale"]
        if scales and any(one.frame.kind == "gradient" for one in shown):
            factor = f"{scales[0].detail.high:.9g}"
            lines.append(
                f"Gradients of outputs have the loss scale {factor} as a factor. Weight gradients "
                "do not."
            )
        if others:
            backward = sum(one.frame.kind in BACKWARD for one in others)
            lines.append(
                f"Later tensors that are not finite: {len(others) - backward} in forward, "
                f"{backward} in backward."
            )
        return lines

    def _advice(self) -> list[str]:
        lines = [""]
        if self.note:
            lines += [_filled(self.note), ""]
        if not self.causes and self.first is None:
            return lines[:-1]
        if not self.causes:
            return [*lines, "No cause of docs/non_finite.md fits these observations."]
        many = len(self.causes) > 1
        for i, cause in enumerate(self.causes):
            title = f"Likely cause{f' {i + 1}' if many else ''}: {cause.name}."
            lines.append(_filled(f"{title} {cause.evidence}"))
            lines.append(_filled(f"What to do: {cause.advice}"))
        if many:
            lines.append("Several causes may apply, and their advice may be combined.")
        text = f"{self.what} {' '.join(cause.evidence for cause in self.causes)}"
        if re.search(r"\b(rows?|columns?|time step) \d", text):
            rows = bool(self.place) and re.search(r"\brows? \d[^.]* of the batch", text)
            lines += ["", _filled(COUNTED + AGAIN * bool(rows))]
        return lines


class NonFiniteError(FloatingPointError):
    """Error of a training step with a tensor that is not finite.

    Attributes:
        report: the `Report`.
    """

    def __init__(self, report: Report, text: str = ""):
        super().__init__(text or str(report))
        self.report = report


def describe(found: Measurement) -> str:
    """Describes a frame and its non-finite elements in a sentence."""
    frame, detail = found.frame, found.detail
    summary = detail.summary
    if frame.kind in SCALARS and summary.size == 1:
        value = "NaN" if summary.nan else "+Inf" if summary.positive_inf else "-Inf"
        return f"{frame.subject} {value if summary.non_finite else detail.low}"
    if frame.kind == "argument":
        return frame.subject + _wrong_values(detail)
    text = f"{frame.subject} {summary}"
    if frame.has_time and detail.steps.any():
        text += f", first at time step {int(detail.steps.argmax())}"
    return text


def _wrong_values(detail: Detail) -> str:
    """Returns the wrong values of an argument, as text that follows the argument's rule."""
    values = np.asarray(detail.values)
    if values.ndim < 3:  # a length, or a measurement with only the range of the wrong values
        low, high = f"{detail.low:.9g}", f"{detail.high:.9g}"
        return f", and the call has {low}{f' to {high}' if high != low else ''}"
    places = np.argwhere(np.isnan(values[1]))
    row, *rest = places[0]
    others = f", and {len(places) - 1} more" if len(places) > 1 else ""
    place = ", ".join(map(str, rest))
    value = f"{values[0][tuple(places[0])]:.9g}"
    return f"; {value} is in row {row} of the batch, position {place}{others}"


def _filled(text: str) -> str:
    """Wraps text to at most 100 columns. A word and its number stay on one line."""
    joined = re.sub(r"\b(step|epoch|batch|row|rows|column|replica) (?=\d)", "\\1\xa0", text)
    joined = re.sub(r"(?<=\d) %", "\xa0%", joined)
    return textwrap.fill(joined, WIDTH, break_long_words=False).replace("\xa0", " ")


def _row(found: Measurement) -> str:
    summary = found.detail.summary
    digits = ".2f" if summary.percent >= 0.01 else ".1g"
    percent = f"{summary.percent:{digits}} %" if summary.non_finite else "-"
    label = found.frame.label
    zeros = f"{summary.zeros}" if summary.zeros else "-"
    room = WIDTH - 43
    if len(label) > room:
        label = "..." + label[3 - room :]
    smallest, largest = f"{summary.abs_min:.3g}", f"{summary.abs_max:.3g}"
    if summary.non_finite == summary.size:
        smallest = largest = "-"
    return f"{smallest:>9} {largest:>9} {zeros:>9}  {percent:>10}  {label}"
