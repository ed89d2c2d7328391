"""`Plan`: which tensor of a file is loaded into which variable, with all errors and a table."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from tfwd import _keras
from tfwd.pretrained import assign, weight_change_listeners
from tfwd.pretrained.chief_source import lockstep, open_together
from tfwd.pretrained.layouts import Step
from tfwd.pretrained.number_checks import problems_in_numbers
from tfwd.pretrained.similar_names import SHOWN, hints
from tfwd.pretrained.sources.base import Entry, Source, SourceError
from tfwd.pretrained.text_table import list_lines, size_text, table_lines

WIDTH = 100  # characters in a line of a table


class PlanError(ValueError):
    """Error for weights that cannot be loaded. Each line of the message is a reason."""


@dataclasses.dataclass
class Plan:
    """Plan of which tensor is loaded into which variable, with all errors.

    `print(plan)` shows a table. `apply` loads the tensors.

    Attributes:
        model: The model whose weights are loaded.
        source: str. Path of the file.
        steps: list. Each variable with its tensor, in the model's order.
        missing: dict from the path of a variable to an error. It has the variables whose key is not
            in the file. The first ten errors that are not allowed also name the nearest keys.
        allowed: list of str. Paths in `missing` that may be missing.
        unexpected: list of str. Keys of the file that no variable uses.
        left_out: list of str. Keys that are ignored, or that belong to parts that the model lacks.
        mistakes: list of str. Other errors, one sentence each.
        strict: bool. True if missing and unexpected keys are errors.
        notes: list of str. Explanations of missing or unexpected keys, one sentence each.
        entries: dict. Shape and dtype of each key in the file when the plan was made.
    """

    model: keras.layers.Layer
    source: str
    steps: list[Step]
    missing: dict[str, str]
    allowed: list[str]
    unexpected: list[str]
    left_out: list[str]
    mistakes: list[str]
    strict: bool
    notes: list[str] = dataclasses.field(default_factory=list)
    entries: Mapping[str, Entry] = dataclasses.field(default_factory=dict)

    def problems(self) -> list[str]:
        """Returns all errors that prevent loading, one sentence each.

        The first ten errors of each kind also name the nearest keys or paths.
        """
        return [problem for group in self._problems() for problem in group]

    def check(self) -> None:
        """Raises a `PlanError` if there are errors, with the first ten of each kind."""
        groups = self._problems()
        if not any(groups):
            return
        lines = []
        for group in groups:
            lines += group[:SHOWN]
            if len(group) > SHOWN:
                lines.append(
                    f"and {len(group) - SHOWN} more: tfwd.pretrained.plan(...).problems() has all"
                )
        hint = ""
        if any(groups[1:]):
            lines = [*self.notes, *lines]
            hint = (
                "\nIs the file complete, and for this model? allow_missing=[patterns of paths] "
                "lets variables keep their initial values. ignore=[patterns of keys] skips keys."
            )
        text = "".join(f"\n- {line}" for line in lines)
        raise PlanError(f"{self.source}: nothing was loaded.{text}{hint}")

    def _problems(self) -> list[list[str]]:
        """Returns the mistakes, the missing keys and the unexpected keys."""
        if not self.strict:
            nothing = [] if self.steps else ["no variable has a key in the file"]
            return [[*self.mistakes, *nothing]]
        allowed = set(self.allowed)
        missing = [f"'{path}' {what}" for path, what in self.missing.items() if path not in allowed]
        paths = [*(step.target.path for step in self.steps), *self.missing]
        hint = hints(paths)
        unexpected = [f"key '{key}' belongs to no variable{hint(key)}" for key in self.unexpected]
        return [self.mistakes, missing, unexpected]

    def _unloaded(self) -> list[str]:
        """Returns a sentence about the variables that `strict=False` lets keep their values."""
        paths = [path for path in self.missing if path not in set(self.allowed)]
        if not paths:
            return []
        shown = ", ".join(paths[:SHOWN])
        more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
        number = f"{len(paths)} of {len(paths) + len(self.steps)} variables"
        return [f"has no key for {number}, and their values are kept: {shown}{more}"]

    def apply(self, allow_overflow: bool = False) -> Plan:
        """Checks all numbers, and then assigns each variable its tensor.

        On several workers, all workers must call it. Only the chief reads the file, as in `load`.

        Args:
            allow_overflow: bool. Lets numbers that are too large for a variable's dtype become
                infinite. Default False.

        Returns:
            The plan itself.

        Raises:
            PlanError: If the plan has errors, if names, shapes or dtypes in the file have changed
                since the plan was made, or if workers have different plans. Nothing is assigned.
            SourceError: If the file cannot be read.
            tf.errors.UnavailableError: If another worker ended.

        Warns:
            UserWarning: If some numbers are NaN or infinite, or if more than one number in a
                thousand becomes 0 in a variable's dtype. A tensor without any finite number, or
                with only such zeros, is an error. With `strict=False`, also if variables that
                `allow_missing` does not name keep their values.
        """
        with self._workers() as workers:
            self._check_equal(workers, allow_overflow)
            self.check()
            warned = self._unloaded()
            with self._opened(workers) as source:
                if mistakes := problems_in_numbers(source, self.steps, allow_overflow, warned):
                    lines = "".join(f"\n- {line}" for line in mistakes)
                    raise PlanError(f"{self.source}: nothing was loaded.{lines}")
                assign.assign(source, self.steps, warned)
        assign.finalize_statistics(self.model, self.steps)
        weight_change_listeners.tell(step.target.variable for step in self.steps)
        if warned:
            more = f"; and {len(warned) - SHOWN} more" if len(warned) > SHOWN else ""
            warnings.warn(
                f"{self.source} was loaded, but {'; '.join(warned[:SHOWN])}{more}", stacklevel=2
            )
        return self

    def value_of(self, variable: keras.Variable) -> np.ndarray | None:
        """Returns the value that the plan loads into a variable; None if it loads none.

        Args:
            variable: Variable of the model.

        Raises:
            PlanError: If names, shapes or dtypes in the file have changed since the plan was made.
            SourceError: If the file cannot be read.
        """
        for step in self.steps:
            if step.target.variable is variable:
                with self._workers() as workers, self._opened(workers) as source:
                    return assign.read_value(source, step)
        return None

    def _workers(self) -> _keras.Lockstep:
        return lockstep(self.model.weights, PlanError, SourceError)

    def _check_equal(self, workers: _keras.Lockstep, allow_overflow: bool) -> None:
        """Raises a `PlanError` if the workers have different plans."""
        if workers.is_alone:
            return
        steps = [
            f"'{step.target.path}', {step.target.dtype} {step.target.shape}, from key '{step.key}' "
            f"and its copies {list(step.copies)}, {step.layout.words}"
            for step in self.steps
        ]
        mine = [*steps, f"allow_overflow={allow_overflow}", *self.problems()]
        chiefs = workers.json_from_chief(lambda: mine)
        for here, there in itertools.zip_longest(mine, chiefs, fillvalue="nothing more"):
            if here != there:
                raise PlanError(
                    f"{self.source}: nothing was loaded. This worker's plan has {here}, but the "
                    f"chief's plan has {there}. Give all workers the same model and arguments"
                )

    @contextlib.contextmanager
    def _opened(self, workers: _keras.Lockstep) -> Iterator[Source]:
        """Opens the file. Raises a `PlanError` if it has changed since the plan was made."""
        with open_together(workers, self.source) as source:
            if changes := list(_changes(self.entries, source.entries)):
                more = f"\n- and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
                lines = "".join(f"\n- {line}" for line in changes[:SHOWN])
                raise PlanError(
                    f"{self.source} has changed since the plan was made; nothing was loaded. Make "
                    f"the plan again.{lines}{more}"
                )
            yield source

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as lists and dicts, for JSON."""
        steps = [
            {
                "variable": step.target.path,
                "key": step.key,
                "layout": step.layout.words,
                "shape": list(step.entry.shape),
                "dtype": step.entry.dtype,
                "bytes": step.entry.nbytes,
            }
            for step in self.steps
        ]
        names = ("source", "missing", "allowed", "unexpected", "left_out", "strict", "notes")
        rest = {name: getattr(self, name) for name in names}
        return {**rest, "steps": steps, "problems": self.problems()}

    def __str__(self) -> str:
        return table(self)


def _changes(before: Mapping[str, Entry], now: Mapping[str, Entry]) -> Iterator[str]:
    """Yields the changes of the names, shapes and dtypes in a file, one sentence each."""
    for key, entry in before.items():
        if key not in now:
            yield f"key '{key}' was removed"
        elif now[key] != entry:
            was, found = (f"{e.dtype} {e.shape}" for e in (entry, now[key]))
            yield f"key '{key}' was {was} and is {found}"
    yield from (f"key '{key}' was added" for key in now if key not in before)


def table(plan: Plan, width: int | None = WIDTH) -> str:
    """Returns a plan as text, in lines of at most `width` characters; None sets no limit."""
    rows: list[tuple[str, ...]] = [
        (
            step.target.path,
            step.key,
            step.layout.words,
            step.entry.dtype
            if step.entry.dtype == step.target.dtype
            else f"{step.entry.dtype} to {step.target.dtype}",
            size_text(step.entry.nbytes),
        )
        for step in plan.steps
    ]
    dtypes = {row[3] for row in rows}
    total = f"{len(rows)} variables, {size_text(sum(s.entry.nbytes for s in plan.steps))}"
    lines = [f"{plan.source}: {total}{f', all {dtypes.pop()}' if len(dtypes) == 1 else ''}"]
    head: tuple[str, ...] = ("variable", "key", "layout", "dtype", "size")
    if not dtypes:
        head, rows = (*head[:3], head[4]), [(*row[:3], row[4]) for row in rows]
    lines += table_lines(head, rows, width)
    allowed = [path for path in plan.missing if path in plan.allowed]
    missing = [f"{path} {what}" for path, what in plan.missing.items() if path not in allowed]
    lines += list_lines("left out", plan.left_out, width)
    lines += list_lines("missing, as allowed", allowed, width)
    lines += list_lines("missing", missing, width)
    lines += list_lines("unexpected", plan.unexpected, width)
    if plan.unexpected or missing:
        lines += [f"note: {note}" for note in plan.notes]
    lines += [f"wrong: {mistake}" for mistake in plan.mistakes]
    return "\n".join(lines)
