"""`Gains`: trainable weights of parametrizations, such as the gains of weight normalization.

`Gains` is a separate layer inside the layer that applies the parametrizations. Its weights come
after the weights of the wrapped layer, in the same files and checkpoints.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers._substitution.weight_selection import Target
from tfwd.parametrizations import Parametrization


class Gains(keras.layers.Layer):
    """The trainable tensors that belong to parametrizations of a layer's weights.

    Attributes:
        gain_axes: dict from the id of a gain to the id of its weight, and to the axis of the weight
            that has an entry of the gain for each of its positions.
    """

    def __init__(self) -> None:
        super().__init__(name="gains")
        self.gain_axes: dict[int, tuple[int, int]] = {}
        self.built = True

    def create(self, owner: str, target: Target, element: Parametrization) -> Any:
        """Creates the gain of one weight, with the value that does not change the weight.

        Args:
            owner: Name of the layer that applies the parametrization.
            target: Weight.
            element: Parametrization for which `trains_reference` is True.

        Returns:
            The variable.
        """

        def first(shape: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
            return element.first_reference(_keras.variables.value(target.variable))

        weight = tf.zeros(target.variable.shape)
        name = f"{target.name.replace('/', '_')}_gain"
        with _keras.variables.name_scope(owner):
            variable = self.add_weight(
                name=name,
                shape=tuple(element.first_reference(weight).shape),
                dtype=_keras.variables.dtype_name(target.variable),
                initializer=first,
                trainable=True,
            )
        axis = getattr(element, "axis", None)  # a user's parametrization may have none
        if axis is not None:
            self.gain_axes[id(variable)] = id(target.variable), axis % len(weight.shape)
        setattr(self, f"gain_{len(self.weights)}", variable)  # checkpoints follow attributes
        return variable

    def load_own_variables(self, store: Any) -> None:
        if self.weights and len(store.keys()) != len(self.weights):
            names = ", ".join(_keras.variables.name(weight) for weight in self.weights)
            raise ValueError(
                f"the file does not have the weights {names}. If a model without these weights "
                "wrote the file, load the file into that model, and then parametrize that model"
            )
        super().load_own_variables(store)
