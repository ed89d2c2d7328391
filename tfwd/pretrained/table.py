"""A plan as a table, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfwd.pretrained.plan import Plan

WIDTH = 100
SHOWN = 20  # names of a kind; a plan's attributes have them all


def table(plan: Plan, width: int | None = WIDTH) -> str:
    """The plan in lines of at most `width` characters; of any length if that is None."""
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
    """A number of bytes, as "11.7 MB"."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def _shortened(text: str, width: int) -> str:
    """The text; if it is too long, its end, which tells more than its beginning."""
    return text if len(text) <= width else f"...{text[len(text) - width + 3 :]}"


def _list(title: str, names: list[str], width: int) -> list[str]:
    """Names below their title, of which there may be many."""
    if not names:
        return []
    shown = [f"  {_shortened(name, width - 2)}" for name in names[:SHOWN]]
    more = [f"  and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return [f"{title} ({len(names)}):", *shown, *more]
