"""Public names of an earlier version. They still work for one version, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def renamed(module: str, names: Mapping[str, tuple[str, Any]]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module with renamed public names.

    Args:
        module: str. Name of the module.
        names: dict from an old name to the new name, in words, and the object.

    Example:
        >>> __getattr__ = renamed("a.module", {"old": ("a.module.new", 3)})
        >>> with warnings.catch_warnings(record=True) as found:
        ...     warnings.simplefilter("always")
        ...     __getattr__("old"), str(found[0].message)
        (3, 'a.module.old is now a.module.new; the old name goes with the next version')
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new, value = names[name]
        message = f"{module}.{name} is now {new}; the old name goes with the next version"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return value

    return find
