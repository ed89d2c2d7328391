"""Plain Keras layers that compute with given tensors in place of their variables.

This module does not use tfwd. On Keras 3 it uses a `keras.StatelessScope`. Layers of Keras 2 read
their weights as attributes, so the attributes are replaced during the call.
"""

import contextlib

import keras
import tensorflow as tf

IS_KERAS_2 = keras.__version__.startswith("2.")

if not IS_KERAS_2:

    class Scope(keras.StatelessScope):
        """A scope that lets through all updates, and falls back to the scope around it."""

        def add_update(self, update):
            variable, value = update
            if self.original_scope is not None:
                self.original_scope.add_update(update)
            else:
                variable._direct_assign(value)

        def get_current_value(self, variable):
            # A wrapper around this layer has already set the tensors that it reads.
            around = self.original_scope
            value = None if around is None else around.get_current_value(variable)
            return super().get_current_value(variable) if value is None else value


@contextlib.contextmanager
def given(layer, values):
    """Makes the layer read tensors in the context: `values` are pairs of variable and tensor."""
    if IS_KERAS_2:
        with _exchanged(layer, values):
            yield
        return
    with Scope(values, collect_losses=True) as scope:
        yield
    for loss in scope.losses:
        layer.add_loss(loss)


@contextlib.contextmanager
def _exchanged(layer, values):
    tensors = {id(variable): tensor for variable, tensor in values}
    tensors |= {id(getattr(v, "_variable", v)): tensors[id(v)] for v, _ in values}
    before = []
    for inner in layer._flatten_layers():
        for name, value in list(vars(inner).items()):
            if id(value) in tensors:
                before.append((inner, name, value))
                tensor = tf.cast(tensors[id(value)], inner._compute_dtype or value.dtype)
                vars(inner)[name] = tensor
    try:
        yield
    finally:
        for inner, name, value in before:
            vars(inner)[name] = value


def feed(layer, values_of):
    """Makes each later call of the layer read the tensors that `values_of()` returns for it."""
    plain_call = layer.call

    def call(*args, **kwargs):
        with given(layer, values_of()):
            return plain_call(*args, **kwargs)

    # Bypasses Keras, which would track the attribute.
    vars(layer)["call"] = call


def flatten(layer):
    """Returns the layer and all layers in it, each once."""
    found = {}
    for inner in layer._flatten_layers():
        found.setdefault(id(inner), inner)
    return list(found.values())


def tensor_of(variable):
    """Returns the `tf.Variable` behind a variable."""
    return variable if isinstance(variable, tf.Variable) or IS_KERAS_2 else variable.value


def states(model):
    """Returns the states that calls leave outside the weights: of RNNs and of generators."""
    weights = {id(v) for v in model.weights}
    found = {}
    # Keras lists the layers of a wrapped model in another order, under the same names.
    for layer in sorted(flatten(model), key=lambda layer: layer.name):
        if type(layer).__name__ == "SeedStream":
            continue
        # Keras does not list the states of a stateful RNN.
        extra = tf.nest.flatten(getattr(layer, "states", None) or [])
        extra = [v for v in extra if hasattr(v, "assign")]
        if not IS_KERAS_2:
            extra += layer._non_trainable_variables
            if getattr(layer, "seed", None) is not None:  # otherwise every layer has another one
                extra += [g.state for g in layer._seed_generators]
        found |= {id(v): v for v in extra if id(v) not in weights}
    return list(found.values())
