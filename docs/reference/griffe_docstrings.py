"""Extension of Griffe: shows the docstrings of tfwd as they are meant.

- The section "Example:" is shown as code.
- An entry for several arguments, "rate, seed: ...", becomes an entry for each.
"""

import re
import textwrap
from typing import Any

import griffe

# The lines of an example are indented or not. A section or an unindented text ends it.
EXAMPLE = re.compile(r"^Example:\n((?:(?:[ >.].*)?\n|[^A-Z\n].*\n)*)", re.MULTILINE)
SEVERAL = re.compile(r"^    (\w+(?:,\s+\w+)+):(.*\n(?:     .*\n)*)", re.MULTILINE)


def as_code(found: re.Match[str]) -> str:
    """Returns an example as a fenced block."""
    return f"**Example**\n\n```pycon\n{textwrap.dedent(found[1]).strip()}\n```\n\n"


def one_by_one(found: re.Match[str]) -> str:
    """Returns an entry for each name."""
    return "".join(f"    {name}:{found[2]}" for name in re.split(r",\s+", found[1]))


class Docstrings(griffe.Extension):
    """Extension that rewrites the docstring of each object."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Changes the docstring of an object, if it has one."""
        if obj.docstring is not None:
            text = SEVERAL.sub(one_by_one, obj.docstring.value + "\n")
            obj.docstring.value = EXAMPLE.sub(as_code, text).strip()
