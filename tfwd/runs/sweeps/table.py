"""The table of trials, in the width that there is: no head and no value is cut."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from tfwd.runs.sweeps.rows import FAILED, Row

_WIDE = 10_000


class Line(NamedTuple):
    """A row as it is shown."""

    trial: str
    values: Sequence[str]
    score: str
    epochs: str
    time: str
    remark: str
    style: str


def table(lines: Sequence[Line], names: Sequence[str], score: str, console: Console) -> Table:
    """The table in the first form that fits.

    The heads are the names, the names in two lines, or letters that are explained below; else all
    values stand in one column, each with its name, and are wrapped between them.

    Args:
        lines: the trials.
        names: of what is varied.
        score: the head of the column of scores.
        console: how wide it may be.
    """
    letters = [_letter(number) for number in range(len(names))]
    folded = [name.replace("_", "_\n") for name in names]
    narrow = [line._replace(remark=line.remark.replace(", ", ",\n")) for line in lines]
    for rows, heads, head in (
        (lines, names, score),
        (narrow, folded, score.replace(" ", "\n")),
        (narrow, letters, score.replace(" ", "\n")),
    ):
        made = _table(rows, heads, head)
        wide = console.options.update_width(_WIDE)
        if Measurement.get(console, wide, made).maximum <= console.width:
            break
    else:
        together = [
            line._replace(values=["  ".join(map("=".join, zip(names, line.values, strict=True)))])
            for line in narrow
        ]
        return _table(together, ["values"], score.replace(" ", "\n"), "left")
    if heads is letters:
        pairs = zip(letters, names, strict=True)
        made.caption = ", ".join(f"{letter}: {name}" for letter, name in pairs)
        made.caption_justify = "left"
    return made


def _table(
    lines: Sequence[Line],
    heads: Sequence[str],
    score: str,
    justify: Literal["left", "right"] = "right",
) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    made.add_column("trial", no_wrap=True)
    for head in heads:
        made.add_column(head, justify=justify, overflow="fold")
    for head in (score, "epochs", "time"):
        made.add_column(head, justify="right", no_wrap=True)
    made.add_column("", overflow="fold")
    for line in lines:
        cells = (line.trial, *line.values, line.score, line.epochs, line.time, line.remark)
        made.add_row(*cells, style=line.style)
    return made


def reasons(rows: Iterable[Row]) -> list[str]:
    """Why trials failed, a line for each reason."""
    failed: dict[str, list[str]] = {}
    for row in rows:
        if row.status == FAILED:
            failed.setdefault(row.message, []).append(row.trial)
    return [
        f"failed: trial{'s' if len(trials) > 1 else ''} {', '.join(sorted(trials))}: {message}"
        for message, trials in failed.items()
    ]


def short_names(space: Mapping[str, Any]) -> dict[str, str]:
    """What is left of the keys without the groups, as long as no two are the same.

    Example:
        >>> short_names({"model.weight_dropout": None, "optimizer.learning_rate": None})
        {'model.weight_dropout': 'weight_dropout', 'optimizer.learning_rate': 'learning_rate'}
    """
    lasts = [key.rpartition(".")[2] for key in space]
    return {
        key: last if lasts.count(last) == 1 else key for key, last in zip(space, lasts, strict=True)
    }


def _letter(number: int) -> str:
    rounds, place = divmod(number, 26)
    return string.ascii_lowercase[place] + (str(rounds) if rounds else "")
