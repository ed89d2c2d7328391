"""Selects whether a wrapper is a new or a legacy optimizer of Keras 2.15.

Keras distinguishes new and legacy optimizers by class, and so do loss scales and tensorflow-addons.
So instances of a class of tfwd have one of two subclasses. `OptimizerWrapper` has the common code.
The kind of the held optimizer selects `NewWrapper` or `LegacyWrapper`, which have the methods that
Keras expects of that kind.
"""

from __future__ import annotations

from typing import Any

from tfwd._keras2 import wrapped_optimizers
from tfwd._keras2.legacy_wrapper import LegacyWrapper
from tfwd._keras2.new_wrapper import NewWrapper


class PicksOptimizerBase(type):
    """Metaclass that makes an instance of the new or the legacy kind, like the held optimizer."""

    _kinds: dict[bool, type]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls, (wrapped_optimizers.New, wrapped_optimizers.Legacy)):
            return super().__call__(*args, **kwargs)
        extended = getattr(cls, "base_optimizer", None)
        given = kwargs.get("optimizer", args[0] if args else None)
        legacy = (
            issubclass(extended, wrapped_optimizers.Legacy)
            if extended
            else wrapped_optimizers.is_legacy(given)
        )
        return cls._of_kind(legacy)(*args, **kwargs)

    def _of_kind(cls, legacy: bool) -> Any:
        if "_kinds" not in vars(cls):
            cls._kinds = {}
        if legacy not in cls._kinds:
            names = {
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
                "__doc__": cls.__doc__,
                # Keras reads the class of an instance when it saves the instance.
                "__class__": property(lambda self: cls),
            }
            bases = (cls, LegacyWrapper if legacy else NewWrapper)
            cls._kinds[legacy] = type.__new__(type(cls), cls.__name__, bases, names)
        return cls._kinds[legacy]
