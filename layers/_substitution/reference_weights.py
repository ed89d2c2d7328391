"""`References`: tensors that parametrizations need, such as the copies of weights for Mixout.

`References` is a separate layer without weights inside the layer that mixes, like `SeedStream`. So
files that a plain layer wrote still load, and no optimizer sees the copies. A reference that is
trained, such as the gain of `WeightNorm`, is a weight of another layer, `Gains`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras, pretrained
from tfwd.layers._substitution import weight_setters
from tfwd.layers._substitution.trainable_gains import Gains
from tfwd.layers._substitution.weight_selection import Target, TargetedWeights
from tfwd.parametrizations import Parametrization
from tfwd.parametrizations.parametrized_layers import added_in_place
from tfwd.pretrained import weight_change_listeners
from tfwd.pretrained.chief_source import lockstep, open_together


class _Reference(NamedTuple):
    value: tf.Variable
    taken: tf.Variable  # True if `value` is set


class _Gain(NamedTuple):
    value: Any  # keras.Variable
    weight: Any  # keras.Variable, the weight that the gain belongs to
    element: Any  # Parametrization


class References(keras.layers.Layer):
    """The references of a layer's weights, copied in the layer's first training call.

    Args:
        owner: Name of the layer that mixes, for messages.
        gains: Layer for the references that are trained. Default None, if there are none.
    """

    def __init__(self, owner: str, gains: Gains | None = None) -> None:
        super().__init__(name="references")
        self._owner = owner
        object.__setattr__(self, "_gains", gains)
        object.__setattr__(self, "_gained", {})  # keyed as `_held`
        # Keyed by the position of the weight and of the element in its chain. Hidden from Keras.
        object.__setattr__(self, "_held", {})
        object.__setattr__(self, "_starts", {})  # weights whose start value is the reference
        object.__setattr__(self, "_set", set())  # ids of weights that were set since a warning
        self.built = True

    def weights_were_set(self, ids: set[int]) -> None:
        """Warns if the references were copied from weights that have been replaced.

        A gain is reset with its weight, unless the gain was set too.

        Args:
            ids: Ids of the variables that have new values.
        """
        if not tf.executing_eagerly():
            return
        for gain in self._gained.values():
            if id(gain.weight) in ids and id(gain.value) not in ids:
                _reset_gain(gain)
        if not weight_setters.are_told() and self._are_stale(ids):
            self._warn()

    def variable_was_set(self, variable: Any, setter: weight_setters.Setter) -> None:
        """Warns as `weights_were_set`, unless the references come from the same file.

        It is called for each variable that a model sets. It warns for the first variable only: a
        variable that is set a second time is the first one of another call.
        """
        inside = _keras.layers.all_layers(setter.layer)
        if setter.loads and any(layer is self for layer in inside):
            return
        if self._are_stale({id(variable)}):
            if not self._set or id(variable) in self._set:
                self._set.clear()
                self._warn()
            self._set.add(id(variable))

    def _are_stale(self, ids: set[int]) -> bool:
        """Returns True if one of some variables has a copied reference."""
        return any(
            id(variable) in ids and bool(self._held[name].taken.read_value())
            for name, variable in self._starts.items()
        )

    def _warn(self) -> None:
        warnings.warn(
            f"layer '{self._owner}' has new weights, but its Mixout still mixes with the weights "
            "of its first training call: call tfwd.reset_references(model), unless the new "
            "weights come from the same training run",
            stacklevel=weight_setters.stack_level(),
        )

    def reset(self) -> None:
        """Discards the copied references, and resets gains. The next training call copies again."""
        self._set.clear()
        for name in self._starts:
            self._held[name].taken.assign(False)
        for gain in self._gained.values():
            _reset_gain(gain)

    def create(self, targeted: TargetedWeights) -> None:
        """Creates the missing references, and reads the references that come from a source.

        Raises:
            ValueError: If a source has no value for a weight, or a value of another shape.
        """
        found = []
        for target, parametrization in targeted:
            for name, element in _named_elements(target, parametrization):
                if element.trains_reference:
                    if name not in self._gained:
                        weight_change_listeners.add(self)
                        variable = self._gains.create(self._owner, target, element)
                        self._gained[name] = _Gain(variable, target.variable, element)
                elif name not in self._held:
                    start = isinstance(element.towards, str) and element.towards == "start"
                    read = None if start else _read(self._owner, target, element.towards)
                    if read is not None and not np.isfinite(read.astype("float64")).all():
                        raise ValueError(
                            f"weight '{target.name}' of layer '{self._owner}': the reference of "
                            "Mixout has elements that are NaN or infinite. Check the source"
                        )
                    own = _keras.variables.dtype_name(target.variable)
                    dtype = element.reference_dtype or own
                    if read is not None and not np.isfinite(tf.cast(read, dtype)).all():
                        raise ValueError(
                            f"weight '{target.name}' of layer '{self._owner}': "
                            f"{_overflow(float(np.abs(read).max()), dtype)}"
                        )
                    found.append((name, target.variable, dtype, read))
        if found:
            weight_change_listeners.add(self)
        for name, variable, dtype, read in found:
            value = np.zeros(tuple(variable.shape), "bool") if read is None else read
            self._held[name] = _Reference(
                self._variable(name, value, dtype),
                self._variable(f"{name}_taken", np.asarray(read is not None), "bool"),
            )
            if read is None:
                self._starts[name] = variable
                weight_setters.listen(variable, self)

    def of(self, target: Target, parametrization: Parametrization) -> list[tf.Variable]:
        """Returns the references of one weight, in the order of its elements with a reference."""
        every = {**self._held, **self._gained}
        return [every[name].value for name, _ in _named_elements(target, parametrization)]

    def all(self) -> list[tf.Variable]:
        """Returns all references.

        It is not a property: in a wrapper's call, Keras 2 would replace the variables of a
        property.
        """
        return [held.value for held in (*self._held.values(), *self._gained.values())]

    def copy_due(self, training: bool | tf.Tensor) -> None:
        """Copies the current weights as references in the first training call."""
        if not self._starts or training is False:
            return
        taken = [self._held[name].taken.read_value() for name in self._starts]
        due = tf.logical_and(tf.logical_not(tf.reduce_all(taken)), training)
        if not tf.executing_eagerly():
            tf.cond(due, self._take, lambda: None)
        elif due:
            self._take()

    def taken(self) -> list[tf.Variable]:
        """Returns the flags of the references that are copied in the first training call."""
        return [self._held[name].taken for name in self._starts]

    def _take(self) -> None:
        values = []
        for name, variable in self._starts.items():
            held = self._held[name]
            now = tf.cast(_keras.variables.value(variable), held.value.dtype)
            # Some references may already be set, by an earlier call or from a file.
            value = tf.where(held.taken.read_value(), held.value.read_value(), now)
            if value.dtype == tf.float16:  # an overflow is an error, except under XLA
                path = _keras.variables.path(variable)
                text = f"weight '{path}': {_overflow(None, 'float16')}"
                value = tf.debugging.check_numerics(value, text)
            values.append(value)
        with tf.control_dependencies(values):  # after an error no reference is taken
            for name, value in zip(self._starts, values, strict=True):
                self._held[name].value.assign(value)
                self._held[name].taken.assign(True)

    def current_values(self, target: Target, parametrization: Parametrization) -> list[tf.Tensor]:
        """Returns the values of one weight's references.

        Before the first training call these are the values that the call would copy.
        """
        found = []
        for name, _ in _named_elements(target, parametrization):
            if name in self._gained:
                found.append(read(self._gained[name].value))
                continue
            held = self._held[name]
            now = tf.cast(_keras.variables.value(target.variable), held.value.dtype)
            found.append(tf.where(held.taken.read_value(), held.value.read_value(), now))
        return found

    def _variable(self, name: str, value: np.ndarray, dtype: str) -> tf.Variable:
        with tf.init_scope():
            variable = tf.Variable(
                tf.cast(value, dtype),
                trainable=False,
                name=f"{self._owner}/references/{name}",
                # Each replica has its own copy, as for a weight, and all copies are equal.
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
        self._track_trackable(variable, name)
        return variable

    def save_own_variables(self, store: Any) -> None:
        for name, held in self._held.items():
            value = tf.convert_to_tensor(held.value)
            # Not every file format supports half precision.
            half = value.dtype in (tf.bfloat16, tf.float16)
            store[name] = (tf.cast(value, tf.float32) if half else value).numpy()
            store[f"{name}_taken"] = tf.convert_to_tensor(held.taken).numpy()

    def load_own_variables(self, store: Any) -> None:
        absent = [name for name in self._held if name not in store]
        if absent:
            raise ValueError(
                f"the file has no references of layer '{self._owner}', which mixes its weights "
                "with them. If a model without Mixout wrote the file, load it with "
                "tfwd.unwrap(model).load_weights(file), which sets the same variables"
            )
        for name, held in self._held.items():
            held.value.assign(tf.cast(np.asarray(store[name]), held.value.dtype))
            held.taken.assign(bool(np.asarray(store[f"{name}_taken"])))


def _overflow(size: float | None, dtype: str) -> str:
    """Returns the error for a reference that its dtype cannot store."""
    reached = "" if size is None else f" and the reference reaches {size:.4g}"
    return (
        f"the reference of Mixout overflows in {dtype}. The largest {dtype} is "
        f"{float(tf.as_dtype(dtype).max):.4g}{reached}. Use reference_dtype='bfloat16', which has "
        "the range of float32, or float32"
    )


def _inside(layer: keras.layers.Layer) -> list[References]:
    """Returns the references in a layer and in all layers inside it, also if in place."""
    found = []
    for inner in _keras.layers.all_layers(layer):
        if isinstance(inner, References):
            found.append(inner)
        found += [one.references for one in added_in_place(inner) if one.references is not None]
    return found


def copy_due_references(layer: keras.layers.Layer, training: bool | tf.Tensor) -> None:
    """Copies the references that are due, in a layer and in all layers in it."""
    for references in _inside(layer):
        references.copy_due(training)


@contextlib.contextmanager
def borrowed(layer: keras.layers.Layer) -> Iterator[None]:
    """Copies the due references for the body. After the body they are due again."""
    inside = _inside(layer)
    due = [taken for references in inside for taken in references.taken() if not taken.numpy()]
    copy_due_references(layer, True)
    try:
        yield
    finally:
        for taken in due:
            taken.assign(False)


def reset_references(layer: keras.layers.Layer) -> None:
    """Makes Mixout copy its references again, and sets the gains of WeightNorm again.

    Call it after loading other weights into a trained model. Until then Mixout uses the weights of
    its first training call, and a gain has the length of an earlier weight. The next training call
    copies the references of Mixout. References that came from a file, a dict or a plan stay. A gain
    immediately gets the length of the present weight, so the effective weight equals the weight.

    Args:
        layer: Model or layer that contains Mixout, or WeightNorm with a gain.

    Raises:
        ValueError: If the layer has no references.

    Example:
        >>> import keras, tensorflow as tf, tfwd
        >>> from tfwd import layers
        >>> dense = layers.Mixout(keras.layers.Dense(2, use_bias=False), rate=0.5, seed=1)
        >>> x = tf.ones((1, 3))
        >>> _ = dense(x, training=True)
        >>> _ = dense.layer.kernel.assign(tf.zeros((3, 2)))  # set_weights would warn
        >>> tfwd.reset_references(dense)
        >>> bool(tf.reduce_all(dense(x, training=True) == 0.0))
        True
    """
    found = _inside(layer)
    if not found:
        raise ValueError(
            f"'{layer.name}' has no references: pass a model or a layer whose weights Mixout "
            "mixes, or WeightNorm(gain=True) normalizes"
        )
    for references in found:
        references.reset()


def read(variable: Any) -> tf.Tensor:
    """Returns the present value of a reference."""
    copied = isinstance(variable, tf.Variable) and not variable.trainable
    return variable.read_value() if copied else _keras.variables.value(variable)


def _reset_gain(gain: _Gain) -> None:
    first = gain.element.first_reference(_keras.variables.value(gain.weight))
    _keras.variables.assign(gain.value, first)


def variables(layer: keras.layers.Layer) -> list[tf.Variable]:
    """Returns all references of a layer and of all layers in it."""
    return [variable for references in _inside(layer) for variable in references.all()]


def _named_elements(target: Target, parametrization: Parametrization) -> list[tuple[str, Any]]:
    """Returns the elements with a reference, each with the reference's name."""
    return [
        (f"{target.position}_{i}", element)
        for i, element in enumerate(parametrization.elements())
        if element.has_reference
    ]


def _read(layer: str, target: Target, source: Any) -> np.ndarray:
    """Reads the reference of a weight from its source."""
    where = f"weight '{target.name}' of layer '{layer}': Mixout"
    if isinstance(source, pretrained.Plan):
        return _of_plan(where, target, source)
    if isinstance(source, Mapping):
        return _of_keys(where, target, list(source), lambda key: np.asarray(source[key]))
    workers = lockstep([target.variable], pretrained.SourceError)
    try:
        with workers, open_together(workers, source) as file:
            return _of_keys(where, target, list(file.entries), file.read)
    except pretrained.SourceError as error:
        raise ValueError(f"{where} cannot read its reference: {error}") from error


def _of_plan(where: str, target: Target, plan: pretrained.Plan) -> np.ndarray:
    try:
        plan.check()
        value = plan.value_of(target.variable)
    except (pretrained.PlanError, pretrained.SourceError) as error:
        raise ValueError(f"{where} cannot use its plan: {error}") from error
    if value is None:
        raise ValueError(
            f"{where} finds no '{target.path}' in its plan, which is for {plan.source}: make the "
            "plan with the model that contains this variable"
        )
    return value


def _of_keys(
    where: str, target: Target, keys: list[str], read: Callable[[str], np.ndarray]
) -> np.ndarray:
    """Reads the one key that ends with the weight's path, or with which the path ends."""
    path = f"/{target.path}"
    found = [key for key in keys if path.endswith(f"/{key}") or f"/{key}".endswith(path)]
    if len(found) != 1:
        there = f"{', '.join(sorted(found or keys)[:5])}{', ...' if len(found or keys) > 5 else ''}"
        what = "more than one key" if found else "no key"
        raise ValueError(
            f"{where} finds {what} for '{target.path}' in its source, which has {there or 'none'}: "
            "one key must be the weight's path, or the last components of the path"
        )
    value = read(found[0])
    if value.shape != tuple(target.variable.shape):
        raise ValueError(
            f"{where} needs a reference of shape {tuple(target.variable.shape)}, but '{found[0]}' "
            f"in its source has shape {value.shape}"
        )
    return value
