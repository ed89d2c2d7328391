"""Tables and lists of long names as text of limited width."""

from __future__ import annotations

from collections.abc import Sequence

_NAMES = 20  # names in a list


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Returns the lines of a table. Its first two columns are cut to the width.

    Args:
        head: Titles of the columns.
        rows: Cells of each row.
        width: int. Characters in a line. None sets no limit.
    """
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    if width is not None:
        room = max(width - sum(widths[2:]) - 2 * (len(head) - 1), 20)
        if widths[0] + widths[1] > room:
            share = room * widths[0] // (widths[0] + widths[1])
            widths[:2] = share, room - share
    lines = []
    for row in [head, *rows]:
        cells = [_shortened(cell, limit) for cell, limit in zip(row, widths, strict=True)]
        texts = [cell.ljust(limit) for cell, limit in zip(cells[:-1], widths, strict=False)]
        lines.append("  ".join([*texts, cells[-1].rjust(widths[-1])]))
    return lines


def list_lines(title: str, names: Sequence[str], width: int | None) -> list[str]:
    """Returns the lines of a titled list of names; none if there are no names.

    Args:
        title: str. Title of the list.
        names: The names. Only the first 20 are shown.
        width: int. Characters in a line. None sets no limit.
    """
    if not names:
        return []
    room = None if width is None else width - 2
    shown = [f"  {_shortened(name, room)}" for name in names[:_NAMES]]
    more = [f"  and {len(names) - _NAMES} more"] if len(names) > _NAMES else []
    return [f"{title} ({len(names)}):", *shown, *more]


def size_text(count: int) -> str:
    """Returns a number of bytes as text, for example "11.7 MB"."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def _shortened(text: str, width: int | None) -> str:
    """Returns the text. If it is too long, returns its end, which is more specific."""
    return text if width is None or len(text) <= width else f"...{text[len(text) - width + 3 :]}"
