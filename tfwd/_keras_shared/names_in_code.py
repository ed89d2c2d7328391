"""Finds the names that the code of a user's layer mentions, such as functions that it calls."""

from __future__ import annotations

import inspect
import types
from typing import Any

# Their methods are no code of users.
_LIBRARIES = ("keras.", "tensorflow.", "tfwd.", "builtins")


def names_in_code(layer: Any) -> set[str]:
    """Returns the names in the methods that users define in a layer's class and its base classes.

    These are attributes and global names, in lower case.
    """
    methods = [
        inspect.unwrap(getattr(function, "python_function", function))
        for cls in type(layer).__mro__
        if not cls.__module__.startswith(_LIBRARIES)
        for function in vars(cls).values()
        if callable(function)
    ]
    codes = [code for method in methods if (code := getattr(method, "__code__", None))]
    found: set[str] = set()
    while codes:
        code = codes.pop()
        found |= {name.lower() for name in code.co_names}
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return found
