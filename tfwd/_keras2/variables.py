"""Variables of Keras 2.15, which are `tf.Variable`s: their values, names and dtypes."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf

from tfwd._keras2.substitution import StandIn, original
from tfwd._keras_shared.layer_paths import path_below
from tfwd._keras_shared.method_replacement import patched


def is_variable(value: Any) -> bool:
    """Returns True if it is a variable of layers."""
    return isinstance(value, tf.Variable)


def weights(layer: Any) -> list[Any]:
    """Returns the weights of a layer that are variables.

    On Keras 2, the weights of an adapted lookup layer contain its table, which is not a variable. A
    model inside the layer that is not built has no weights.
    """
    with _unbuilt_has_no_weights():
        return [weight for weight in layer.weights if is_variable(weight)]


def trainable_variables(layer: Any) -> list[Any]:
    """Returns the trainable variables of a layer. A model that is not built has no variables."""
    with _unbuilt_has_no_weights():
        return [weight for weight in layer.trainable_variables if is_variable(weight)]


def all_variables(model: keras.Model) -> list[Any]:
    """Returns the weights of a model. On Keras 3, metrics and random states belong to them too."""
    return weights(model)


def _unbuilt_has_no_weights() -> contextlib.AbstractContextManager[None]:
    """Lets models that are not built have no weights in the body, at any depth in other models.

    A Sequential without inputs, and other models that define `build`, would raise an error.
    """
    classes = (keras.Model, keras.Sequential)
    return patched([(cls, "_assert_weights_created", lambda own: _accept) for cls in classes])


def _accept(model: keras.Model) -> None:
    """Accepts a model without weights."""


def held(layer: Any) -> list[Any]:
    """Returns the layer's own weights that are variables, without weights of inner layers."""
    own = [*layer._trainable_weights, *layer._non_trainable_weights]
    return [weight for weight in own if is_variable(weight)]


def value(variable: tf.Variable) -> tf.Tensor:
    """Returns the variable's current value in its own dtype, even in an autocast scope."""
    return StandIn(original(variable)).in_own_dtype()


def constant(variable: tf.Variable) -> tf.Tensor:
    """Returns the variable's own value. No tape and no function records the read.

    Otherwise a tape would watch states of recurrent layers, which Keras 2 creates as trainable.
    """
    plain = tf_variable(variable)
    return tf.raw_ops.ReadVariableOp(resource=plain.handle, dtype=plain.dtype)


def read(variable: tf.Variable) -> tf.Tensor:
    """Returns the variable's current value in the dtype in which a layer reads it."""
    return StandIn(original(variable)).value()


def cast_as_read(variable: Any, rows: tf.Tensor) -> tf.Tensor:
    """Returns a part of a variable's value in the dtype in which an embedding reads it."""
    return rows


def assign(variable: tf.Variable, value: Any) -> None:
    """Assigns to a variable, as a layer's call does."""
    StandIn(original(variable)).assign(value)


def tf_variables(variable: tf.Variable) -> list[tf.Variable]:
    """Returns the `tf.Variable` of a layer's variable, and its copies on replicas."""
    own = tf_variable(variable)
    return [own, *getattr(own, "values", ())]


def tf_variable(variable: tf.Variable) -> tf.Variable:
    """Returns the `tf.Variable` of a layer's variable, which TensorFlow's checkpoints can track."""
    variable = original(variable)
    return getattr(variable, "_variable", variable)


def path(variable: Any) -> str:
    """Returns the path of a variable: the names of its layers and its own name, joined by `/`."""
    return str(variable.name).partition(":")[0]


def name(variable: Any) -> str:
    """Returns the variable's own name in its layer."""
    return path(variable).rpartition("/")[2]


def dtype_name(variable: Any) -> str:
    """Returns the name of the dtype in which a variable is stored."""
    return tf.as_dtype(variable.dtype).base_dtype.name


def paths(layer: Any) -> list[str]:
    """Returns the path of each of a built layer's weights, in their order.

    A path consists of the names of the layers that contain the weight, from the given layer on, and
    the weight's own name. The names of Keras 2 are not such paths, because they come from the name
    scopes of the call that created the variable. If a layer calls `build` of an inner layer, the
    names of the inner layer's weights lack its name.
    """
    found: dict[int, str] = {}

    def walk(inner: Any, prefix: str) -> None:
        for variable in held(inner):
            found.setdefault(id(variable), prefix + name(variable))
        for sublayer in inner._flatten_layers(recursive=False, include_self=False):
            walk(sublayer, path_below(prefix, inner, sublayer))

    walk(layer, f"{layer.name}/")
    return [found.get(id(variable), path(variable)) for variable in weights(layer)]


def name_scope(name: str) -> Any:
    """Returns a context in which the paths of new variables begin with a name."""
    return tf.name_scope(name)
