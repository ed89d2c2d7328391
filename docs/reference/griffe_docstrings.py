"""Extension of Griffe: shows the docstrings of tfwd as they are meant.

- The section "Example:" is shown as code.
- An entry for several arguments, "rate, seed: ...", becomes an entry for each.
- A function with the name of a file beside it, such as `tfwd.pretrained.plan`, hides the file, as
  in Python.
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
    """Rewrites the docstring of each object, and shows imported names in place of files."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Changes the docstring of an object, if it has one."""
        if obj.docstring is not None:
            text = SEVERAL.sub(one_by_one, obj.docstring.value + "\n")
            obj.docstring.value = EXAMPLE.sub(as_code, text).strip()

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Puts the names that a package imports in place of files with the same names."""
        for module in (pkg, *pkg.modules.values()):
            if module is not pkg and not module.is_alias:
                self.on_package(pkg=module)
        for name, path in pkg.imports.items():
            file = pkg.members.get(name)
            if isinstance(file, griffe.Module) and file.path != path:
                for member in pkg.members.values():  # others may be imported from that file
                    if member.is_alias:
                        member.resolve_target()
                target = pkg.modules_collection[path]
                pkg.members[name] = griffe.Alias(name, target, parent=pkg)
