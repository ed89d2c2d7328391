"""Plan of which tensor of a file becomes which variable, with its problems, table and execution."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from tfwd import _keras
from tfwd.pretrained import assign, listeners
from tfwd.pretrained.chief_source import lockstep, open_together
from tfwd.pretrained.layouts import Step
from tfwd.pretrained.sources.base import Entry, Source, SourceError

SHOWN = 10  # problems of one kind in a message
WIDTH = 100  # characters in a line of a table
TABLE_NAMES = 20  # names of one kind in a table; the plan's attributes have all


class PlanError(ValueError):
    """Error for weights that cannot be loaded; each line of the message is a reason."""


@dataclasses.dataclass
class Plan:
    """Plan of which tensor becomes which variable, with all problems.

    `print(plan)` shows it as a table. `apply` executes it.

    Attributes:
        model: the model to load.
        source: str. The path of the file.
        steps: the tensor of each variable, in the model's order.
        missing: dict from the paths of variables that the file lacks to the keys that were
            expected. The first ten that may not be missing also have the nearest keys.
        allowed: the paths in `missing` that may be missing.
        unexpected: keys of the file that no variable takes.
        left_out: keys of parts that the model lacks, or that are ignored.
        mistakes: other problems, a sentence each.
        strict: bool. Treats missing and unexpected keys as errors.
        notes: explanations of missing or unexpected keys, a sentence each.
        entries: the shape and dtype of each key in the file when the plan was made.
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
        """Returns all reasons that prevent loading, a sentence each.

        The first ten of each kind have the nearest names.
        """
        return [problem for group in self._problems() for problem in group]

    def check(self) -> None:
        """Raises a `PlanError` if there are problems, with the first ten of each kind."""
        groups = self._problems()
        if not any(groups):
            return
        lines = []
        for group in groups:
            lines += group[:SHOWN]
            if len(group) > SHOWN:
                lines.append(
                    f"and {len(group) - SHOWN} more: plan.problems() has all, and "
                    "tfwd-pretrained plan prints them"
                )
        hint = ""
        if any(groups[1:]):
            lines = [*self.notes, *lines]
            hint = (
                "\nIs the file complete, and for this model? allow_missing=[patterns of paths] "
                "lets "
                "variables keep their initial values. ignore=[patterns of keys] skips keys."
            )
        text = "".join(f"\n- {line}" for line in lines)
        raise PlanError(f"{self.source}: nothing was loaded.{text}{hint}")

    def _problems(self) -> list[list[str]]:
        """Returns the mistakes, the missing keys and the unexpected keys."""
        if not self.strict:
            return [self.mistakes]
        allowed = set(self.allowed)
        missing = [f"'{path}' {what}" for path, what in self.missing.items() if path not in allowed]
        paths = [*(step.target.path for step in self.steps), *self.missing]
        hint = hints(paths)
        unexpected = [f"key '{key}' belongs to no variable{hint(key)}" for key in self.unexpected]
        return [self.mistakes, missing, unexpected]

    def apply(self, allow_overflow: bool = False) -> Plan:
        """Checks all numbers, and then assigns each variable its tensor.

        On several workers, all must call it, and only the chief reads the file. See `load`.

        Args:
            allow_overflow: bool. Allows numbers that are too large for a variable's dtype to become
                infinite.

        Returns:
            The plan itself.

        Raises:
            PlanError: there are problems, or the file has other names, shapes or dtypes than when
                the plan was made, or workers have different plans. Then nothing is assigned.
            SourceError: the file cannot be read.
            tf.errors.UnavailableError: another worker ended.

        Warns:
            UserWarning: some numbers are NaN or infinite, or more than one in a thousand becomes 0
                in a variable's dtype. If that holds for a whole tensor, it is an error.
        """
        with self._workers() as workers:
            self._check_equal(workers, allow_overflow)
            self.check()
            doubts: list[str] = []
            with self._opened(workers) as source:
                if mistakes := assign.problems_in_numbers(
                    source, self.steps, allow_overflow, doubts
                ):
                    lines = "".join(f"\n- {line}" for line in mistakes)
                    raise PlanError(f"{self.source}: nothing was loaded.{lines}")
                assign.assign(source, self.steps, doubts)
        _finalize_statistics(self.model, self.steps)
        listeners.tell(step.target.variable for step in self.steps)
        if doubts:
            more = f"; and {len(doubts) - SHOWN} more" if len(doubts) > SHOWN else ""
            warnings.warn(
                f"{self.source} was loaded, but {'; '.join(doubts[:SHOWN])}{more}", stacklevel=2
            )
        return self

    def value_of(self, variable: keras.Variable) -> np.ndarray | None:
        """Returns the planned value of a variable of the model; None if the file has none for it.

        Raises:
            PlanError: the file has other names, shapes or dtypes than when the plan was made.
            SourceError: the file cannot be read.
        """
        for step in self.steps:
            if step.target.variable is variable:
                with self._workers() as workers, self._opened(workers) as source:
                    return assign.read_value(source, step)
        return None

    def _workers(self) -> _keras.Lockstep:
        return lockstep(self.model.weights, PlanError, SourceError)

    def _check_equal(self, workers: _keras.Lockstep, allow_overflow: bool) -> None:
        """Raises a `PlanError` if the workers have different plans. One process has one plan."""
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
                    f"{self.source}: nothing was loaded. This worker's plan has {here}; the "
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


def _finalize_statistics(model: keras.layers.Layer, steps: Iterable[Step]) -> None:
    """Lets `Normalization` layers use their loaded statistics.

    Such a layer computes with constants, which Keras makes from the variables. Functions that `fit`
    or `predict` traced before contain the old constants.
    """
    owners = {id(step.target.owner): step.target.owner for step in steps}
    loaded = [x for x in owners.values() if isinstance(x, keras.layers.Normalization)]
    for layer in loaded:
        layer.finalize_state()
    if loaded:
        for layer in _keras.layers.all_layers(model):
            if isinstance(layer, keras.Model):
                _keras.training.forget_functions(layer)


def _changes(before: Mapping[str, Entry], now: Mapping[str, Entry]) -> Iterator[str]:
    """Yields the differences between the names, shapes and dtypes of a file then and now."""
    for key, entry in before.items():
        if key not in now:
            yield f"key '{key}' is gone"
        elif now[key] != entry:
            was, found = (f"{e.dtype} {e.shape}" for e in (entry, now[key]))
            yield f"key '{key}' was {was} and is {found}"
    yield from (f"key '{key}' is new" for key in now if key not in before)


def hints(names: Iterable[str]) -> Callable[[str], str]:
    """Returns a function from a wrong name to a hint: the most similar names.

    A hint compares the wrong name with all names. Only the first `SHOWN` wrong names get a hint, as
    many as a message shows. So the time is linear in the number of keys if all keys are wrong.
    """
    candidates, given = list(names), itertools.count()

    def hint(name: str) -> str:
        if next(given) >= SHOWN:
            return ""
        found = difflib.get_close_matches(name, candidates, n=2, cutoff=0.5)
        return f"; nearest: {', '.join(found)}" if found else ""

    return hint


def table(plan: Plan, width: int | None = WIDTH) -> str:
    """Returns the plan as lines of at most `width` characters; None sets no limit."""
    rows: list[tuple[str, ...]] = [
        (
            step.target.path,
            step.key,
            step.layout.words,
            step.entry.dtype
            if step.entry.dtype == step.target.dtype
            else f"{step.entry.dtype} to {step.target.dtype}",
            size(step.entry.nbytes),
        )
        for step in plan.steps
    ]
    dtypes = {row[3] for row in rows}
    whole = f"{len(rows)} variables, {size(sum(s.entry.nbytes for s in plan.steps))}"
    lines = [f"{plan.source}: {whole}{f', all {dtypes.pop()}' if len(dtypes) == 1 else ''}"]
    head: tuple[str, ...] = ("variable", "key", "layout", "dtype", "size")
    if not dtypes:
        head, rows = (*head[:3], head[4]), [(*row[:3], row[4]) for row in rows]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    width = width or sum(widths) + 2 * len(head) + 10_000
    room = max(width - sum(widths[2:]) - 2 * (len(head) - 1), 20)
    if widths[0] + widths[1] > room:
        share = room * widths[0] // (widths[0] + widths[1])
        widths[:2] = share, room - share
    for row in [head, *rows]:
        cells = [_shortened(cell, wide) for cell, wide in zip(row, widths, strict=True)]
        texts = [cell.ljust(wide) for cell, wide in zip(cells[:-1], widths, strict=False)]
        lines.append("  ".join([*texts, cells[-1].rjust(widths[-1])]))
    allowed = [path for path in plan.missing if path in plan.allowed]
    lines += _list("left out", plan.left_out, width)
    lines += _list("missing, as allowed", allowed, width)
    missing = [f"{path} {what}" for path, what in plan.missing.items() if path not in allowed]
    lines += _list("missing", missing, width)
    lines += _list("unexpected", plan.unexpected, width)
    if plan.unexpected or missing:
        lines += [f"note: {note}" for note in plan.notes]
    lines += [f"wrong: {mistake}" for mistake in plan.mistakes]
    return "\n".join(lines)


def size(count: int) -> str:
    """Returns a number of bytes as text, as "11.7 MB"."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def _shortened(text: str, width: int) -> str:
    """Returns the text. If it is too long, returns its end, which is more specific."""
    return text if len(text) <= width else f"...{text[len(text) - width + 3 :]}"


def _list(title: str, names: list[str], width: int) -> list[str]:
    """Returns the lines of a titled list of names, which may be long."""
    if not names:
        return []
    shown = [f"  {_shortened(name, width - 2)}" for name in names[:TABLE_NAMES]]
    more = [f"  and {len(names) - TABLE_NAMES} more"] if len(names) > TABLE_NAMES else []
    return [f"{title} ({len(names)}):", *shown, *more]
