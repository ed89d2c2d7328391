"""Tensors in place of the values of a layer's variables, on Keras 2.15.

A layer of Keras 2 reads its weights as attributes. While a substitution is open on this thread, an
attribute that is a variable, or a list of variables, is returned as `StandIn`s. A stand-in behaves
like a variable. If it is converted to a tensor, the result is the substitute, cast as Keras would
cast the variable. Its assignments go to the substitution. Nothing is assigned to a layer, and other
threads are not affected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.mixed_precision import autocast_variable
from keras.src.mixed_precision.autocast_variable import AutoCastVariable

from tfwd._keras_shared.method_replacement import Patch, patched
from tfwd._keras_shared.substitution_scopes import Scope

Base = keras.layers.Layer

_here = threading.local()

# Attributes in which Keras itself tracks a layer's variables. They must have the real variables.
_KERAS_LISTS = frozenset(
    {
        "_trainable_weights",
        "_non_trainable_weights",
        "_non_trainable_variable",
        "_self_tracked_trackables",
        "_self_unconditional_checkpoint_dependencies",
        "_self_unconditional_dependency_names",
        "_obj_reference_counts_dict",
        "_obj_reference_counts",
        "_self_saveable_object_factories",
        "_metrics",
        "_initial_weights",
        "_callable_losses",
        "_losses",
        "_updates",
        "__dict__",
        "weights",
        "_undeduplicated_weights",
        "variables",
        "trainable_weights",
        "trainable_variables",
        "non_trainable_weights",
        "non_trainable_variables",
        "submodules",
    }
)


def present_scope() -> Substitution | None:
    """Returns the innermost substitution that is open on this thread, or None."""
    return getattr(_here, "scope", None)


def raw_value(variable: tf.Variable) -> tf.Tensor:
    """Returns the variable's own value in its own dtype."""
    with autocast_variable.enable_auto_cast_variables(None):
        return tf.convert_to_tensor(variable)


def original(variable: Any) -> Any:
    """Returns the variable itself, also for a stand-in."""
    return variable.stood_in_for if isinstance(variable, StandIn) else variable


class Substitution(Scope):
    """A `Scope` that stand-ins call at each read and at each update of a variable.

    Args:
        values: Pairs of a variable and its substitute.
        capture: bool. Stores updates in `updates` and does not make them.

    Attributes:
        losses: Losses that layers added inside the scope.
    """

    def __init__(self, values: list[tuple[tf.Variable, tf.Tensor]], capture: bool) -> None:
        self._begin([(original(variable), value) for variable, value in values], capture)
        self.losses: list[tf.Tensor] = []
        self.original_scope: Substitution | None = None
        self._patched = patched(_PATCHES)

    def __enter__(self) -> Any:
        self.original_scope = present_scope()
        _here.scope = self
        self._patched.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _here.scope = self.original_scope
        self._patched.__exit__(None, None, None)

    @staticmethod
    def _make(variable: tf.Variable, value: Any) -> None:
        original(variable).assign(value)

    def add_loss(self, loss: tf.Tensor) -> None:
        """Records a loss that a layer adds."""
        self.losses.append(loss)


_BY_ROWS: dict[str, Callable[..., tf.Tensor]] = {
    "scatter_update": tf.tensor_scatter_nd_update,
    "scatter_add": tf.tensor_scatter_nd_add,
    "scatter_sub": tf.tensor_scatter_nd_sub,
    "scatter_min": tf.tensor_scatter_nd_min,
    "scatter_max": tf.tensor_scatter_nd_max,
    "scatter_nd_update": tf.tensor_scatter_nd_update,
    "scatter_nd_add": tf.tensor_scatter_nd_add,
    "scatter_nd_sub": tf.tensor_scatter_nd_sub,
}


class StandIn(AutoCastVariable):
    """A replacement for a variable, with a value from the open substitution."""

    def __init__(self, variable: tf.Variable) -> None:
        # The constructor of the base class supports only floating variables, so it is not called.
        self._variable = variable
        self._op = "delegate"

    @property
    def stood_in_for(self) -> tf.Variable:
        """The replaced variable."""
        return self._variable

    def in_own_dtype(self) -> tf.Tensor:
        """Returns the current value in the variable's own dtype, even in an autocast scope."""
        scope = present_scope()
        value = None if scope is None else scope.get_current_value(self._variable)
        return raw_value(self._variable) if value is None else value

    def _cast(self, value: tf.Tensor) -> tf.Tensor:
        floating = self._variable.dtype.is_floating
        cast = isinstance(self._variable, AutoCastVariable) and floating and self._should_cast()
        return tf.cast(value, self._cast_dtype) if cast else value

    def value(self) -> tf.Tensor:
        return self._cast(self.in_own_dtype())

    def read_value(self) -> tf.Tensor:
        return self._cast(self.in_own_dtype())

    def numpy(self) -> Any:
        return self.in_own_dtype().numpy()

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return self._cast(tf.gather(self.in_own_dtype(), indices, name=name))

    def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return self._cast(tf.gather_nd(self.in_own_dtype(), indices, name=name))

    def _dense_var_to_tensor(
        self, dtype: Any = None, name: str | None = None, as_ref: bool = False
    ) -> tf.Tensor:
        value = self._cast(self.in_own_dtype())
        if dtype is not None and not tf.as_dtype(dtype).is_compatible_with(value.dtype):
            raise ValueError(
                f"variable {self._variable.name} has dtype {value.dtype.name}, but a tensor of "
                f"dtype {dtype} was expected: cast it with tf.cast"
            )
        return value

    def assign(
        self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True
    ) -> Any:
        value = tf.convert_to_tensor(value, self._variable.dtype)
        scope = present_scope()
        if scope is None:
            self._variable.assign(value)
        else:
            scope.add_update((self._variable, value))
        return self if read_value else None

    def assign_add(
        self, delta: Any, use_locking: Any = None, name: Any = None, read_value: bool = True
    ) -> Any:
        delta = tf.convert_to_tensor(delta, self._variable.dtype)
        return self.assign(self.in_own_dtype() + delta, read_value=read_value)

    def assign_sub(
        self, delta: Any, use_locking: Any = None, name: Any = None, read_value: bool = True
    ) -> Any:
        delta = tf.convert_to_tensor(delta, self._variable.dtype)
        return self.assign(self.in_own_dtype() - delta, read_value=read_value)

    def _apply_update(self, update_fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Updates some rows as the given method of a variable would."""
        name = update_fn.__name__
        if name not in _BY_ROWS:
            raise NotImplementedError(
                f"variable {self._variable.name} is updated by its method {name}, which a call on "
                f"substituted values does not support: use assign or {', '.join(_BY_ROWS)}"
            )
        if name.startswith("scatter_nd_"):
            indices, values = args[:2]
        else:  # the argument is a tf.IndexedSlices
            indices, values = args[0].indices[..., tf.newaxis], args[0].values
        values = tf.convert_to_tensor(values, self._variable.dtype)
        return self.assign(_BY_ROWS[name](self.in_own_dtype(), indices, values))


tf.register_tensor_conversion_function(StandIn, StandIn._dense_var_to_tensor)


def stand_in(value: Any) -> Any:
    """Returns an attribute's value with stand-ins in place of its variables."""
    if isinstance(value, tf.Variable):
        return value if isinstance(value, StandIn) else StandIn(value)
    if isinstance(value, (list, tuple)):
        if any(isinstance(item, tf.Variable) for item in value):
            items = [stand_in(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
    elif isinstance(value, dict) and any(isinstance(i, tf.Variable) for i in value.values()):
        return {key: stand_in(item) for key, item in value.items()}
    return value


def _reading(self: Any, name: str) -> Any:
    value = object.__getattribute__(self, name)
    if present_scope() is None or name in _KERAS_LISTS:
        return value
    return stand_in(value)


def _adding(own: Any) -> Any:
    def add_loss(self: Any, losses: Any, **kwargs: Any) -> None:
        scope = present_scope()
        for loss in tf.nest.flatten(losses):
            if scope is None or not tf.is_tensor(loss):  # a function returns a loss at each read
                own(self, loss, **kwargs)
            else:
                scope.add_loss(loss)

    return add_loss


_PATCHES: tuple[Patch, ...] = (
    (Base, "__getattribute__", lambda own: _reading),
    (Base, "add_loss", _adding),
)
