"""Finds the names that the code of a user's layer mentions, such as functions that it calls."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

from tfwd._keras_shared.keras_own_code import is_of_keras

# Beside Keras: their functions are no code of users.
_LIBRARIES = ("tensorflow.", "tfwd.", "numpy", "builtins")


def names_in_code(layer: Any, left_out: Collection[str] = ()) -> set[str]:
    """Returns the names in the code that users write for a layer, in lower case.

    The names are attributes and global names. The code includes the methods of the layer, the
    functions that are attributes of the layer, and the functions that this code calls by a name.

    Args:
        layer: The layer.
        left_out: Names of methods whose code does not count.
    """
    found: set[str] = set()
    waiting, seen = list(_functions(layer, left_out)), set[int]()
    while waiting:
        given = waiting.pop()
        function = inspect.unwrap(getattr(given, "python_function", given))
        if id(function) in seen or not isinstance(function, types.FunctionType):
            continue
        seen.add(id(function))
        names = set(_names(function.__code__))
        found |= {name.lower() for name in names}
        called = [function.__globals__[name] for name in names & function.__globals__.keys()]
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        waiting += [other for other in (*called, *cells) if _is_of_user(other)]
    return found


def _functions(layer: Any, left_out: Collection[str]) -> Iterator[Callable[..., Any]]:
    """Yields the functions of a layer's class, and those that are its attributes."""
    for cls in type(layer).__mro__:
        if not _is_of_library(cls):
            methods = [value for name, value in vars(cls).items() if name not in left_out]
            yield from filter(callable, methods)
    yield from filter(_is_of_user, vars(layer).values())


def _is_of_user(value: Any) -> bool:
    inner = getattr(value, "python_function", value)
    is_function = isinstance(inner, types.FunctionType)
    return is_function and not _is_of_library(inner)


def _is_of_library(defined: Any) -> bool:
    if defined.__module__ is None:  # a function that `exec` has made
        return False
    return is_of_keras(defined) or defined.__module__.startswith(_LIBRARIES)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the names in code, and in the functions that it defines."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that has no value yet
        return False
