"""`TransformerStack`: layers of an encoder, one after the other."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers.transformer import composite
from tfwd.layers.transformer.composite import built
from tfwd.layers.transformer.formats.published import Published
from tfwd.layers.transformer.inputs import Inputs, of_places
from tfwd.layers.transformer.layer import TransformerLayer


@keras.saving.register_keras_serializable("tfwd.transformer")
class TransformerStack(Published):
    """Transformer layers, each on the output of the one before.

    Formula: `h_0 = x`, `h_i = layer_i(h_(i-1))`; the output is the last.

    Args:
        num_layers: the number of layers.
        num_heads, hidden_size, intermediate_size, activation, dropout, attention_dropout, epsilon,
            initializer: as in `TransformerLayer`.
        num_shared: the number of layers with weights of their own, as in ALBERT: layer i has the
            weights of number `int(i / (num_layers / num_shared))`. None: each has its own.
        return_all: whether to return all hidden states, and not only the last.
        **kwargs: as for any layer.

    Call: `stack(x, mask=None, training=None)`; `x` is `[batch, places, hidden_size]`, `mask` as in
    `SelfAttention`. Output: as `x`; with `return_all` a list of `num_layers + 1`, the first of them
    `x`.

    The layers that it holds are `layer_0`, `layer_1`, ...

    Raises:
        ValueError: a size is not positive, `num_heads` does not divide `hidden_size`, or
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
                f"num_shared={num_shared}: the first must be positive, and the second at most that"
            )
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = activation
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.epsilon = epsilon
        self.initializer = composite.initializer(initializer)
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
        _keras.variables.checkpoint_list(self, "layers")

    def build(self, input_shape: Any) -> None:
        for layer in self.layers:
            built(layer, *input_shape)
        self.built = True

    def call(self, inputs: tf.Tensor, mask: Any = None, training: Any = None) -> Any:
        if mask is not None:  # checked here, once for all layers
            checked = Inputs(self)
            mask = checked.mask("mask", mask, inputs, inputs)
            inputs = checked.marked(inputs)
        states = [inputs]
        for i in range(self.num_layers):
            states.append(self.run(states[-1], i, i + 1, mask, training))
        return states if self.return_all else states[-1]

    def run(self, inputs: tf.Tensor, start: int, stop: int, mask: Any, training: Any) -> tf.Tensor:
        """What the layers from number `start` on, up to `stop`, make of an input."""
        for i in range(start, stop):
            # Hugging Face's formula, floating point included: 18 layers in 14 groups depend on it.
            layer = self.layers[int(i / (self.num_layers / len(self.layers)))]
            inputs = layer(inputs, mask=mask, training=training)
        return inputs

    def compute_output_shape(self, input_shape: Any) -> Any:
        return [input_shape] * (self.num_layers + 1) if self.return_all else input_shape

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        mask = of_places(mask)
        return [mask] * (self.num_layers + 1) if self.return_all else mask
