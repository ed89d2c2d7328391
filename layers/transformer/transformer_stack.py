"""`TransformerStack`: the layers of an encoder, one after the other."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers.transformer import composite_layer
from tfwd.layers.transformer.composite_layer import built
from tfwd.layers.transformer.formats.published_layer import Published
from tfwd.layers.transformer.input_checks import InputChecks
from tfwd.layers.transformer.position_mask import position_mask
from tfwd.layers.transformer.transformer_layer import TransformerLayer


@keras.saving.register_keras_serializable("tfwd.transformer")
class TransformerStack(Published):
    """A stack of transformer layers. Each layer runs on the output of the previous layer.

    Formula: `h_0 = x`, `h_i = layer_i(h_(i-1))`. The output is the last state.

    Args:
        num_layers: int. Number of layers.
        num_heads, hidden_size, intermediate_size, activation, dropout, attention_dropout, epsilon,
            initializer: As in `TransformerLayer`.
        num_shared: int. Number of different sets of weights, as in ALBERT. Layer i uses set number
            `int(i / (num_layers / num_shared))`. Default None: each layer has its own set.
        return_all: bool. Returns all hidden states, not only the last state. Default False.
        **kwargs: Arguments of every Keras layer, such as `name`.

    Call: `stack(x, mask=None, training=None)`. `x` is `[batch, length, hidden_size]`, and `mask` is
    as in `SelfAttention`. The output has the shape of `x`. With `return_all` it is a list of
    `num_layers + 1` tensors that begins with `x`.

    Sublayers: `layer_0`, `layer_1`, ...

    Raises:
        ValueError: If a size is not positive, if `num_heads` does not divide `hidden_size`, or if
            `num_shared` is more than `num_layers`.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.layers import transformer as T
        >>> stack = T.TransformerStack(3, num_heads=2, hidden_size=8, intermediate_size=16)
        >>> stack(tf.ones([2, 5, 8])).shape
        TensorShape([2, 5, 8])

    References: Devlin et al., "BERT" (2019); Lan et al., "ALBERT" (2020), for `num_shared`.
    """

    part = "stack"

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "gelu",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        epsilon: float = 1e-12,
        initializer: Any = 0.02,
        num_shared: int | None = None,
        return_all: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if num_layers < 1 or not 1 <= (num_shared or 1) <= num_layers:
            raise ValueError(
                f"TransformerStack '{self.name}': num_layers={num_layers}, "
                f"num_shared={num_shared}: expected num_layers >= 1, and num_shared from 1 to "
                "num_layers"
            )
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = activation
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.epsilon = epsilon
        self.initializer = composite_layer.initializer(initializer)
        self.num_shared = num_shared
        self.return_all = return_all
        self.layers = [
            self.inner(
                TransformerLayer,
                num_heads,
                hidden_size,
                intermediate_size,
                activation=activation,
                dropout=dropout,
                attention_dropout=attention_dropout,
                epsilon=epsilon,
                initializer=self.initializer,
                name=f"layer_{i}",
            )
            for i in range(num_shared or num_layers)
        ]
        _keras.checkpointed_state.checkpoint_list(self, "layers")

    def build(self, input_shape: Any) -> None:
        for layer in self.layers:
            built(layer, *input_shape)
        self.built = True

    def call(self, inputs: tf.Tensor, mask: Any = None, training: Any = None) -> Any:
        if mask is not None:  # checked once for all layers
            checked = InputChecks(self)
            mask = checked.mask("mask", mask, inputs, inputs)
            inputs = checked.nan_if_wrong(inputs)
        states = [inputs]
        for i in range(self.num_layers):
            states.append(self.run(states[-1], i, i + 1, mask, training))
        return states if self.return_all else states[-1]

    def run(self, inputs: tf.Tensor, start: int, stop: int, mask: Any, training: Any) -> tf.Tensor:
        """Runs the layers from number `start` up to, but not including, `stop`."""
        for i in range(start, stop):
            # Hugging Face's formula in floating point: 18 layers in 14 groups depend on the
            # rounding.
            layer = self.layers[int(i / (self.num_layers / len(self.layers)))]
            inputs = layer(inputs, mask=mask, training=training)
        return inputs

    def compute_output_shape(self, input_shape: Any) -> Any:
        return [input_shape] * (self.num_layers + 1) if self.return_all else input_shape

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        mask = position_mask(mask)
        return [mask] * (self.num_layers + 1) if self.return_all else mask
