"""`T5Stack`: T5's encoder or decoder, on embedded tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers.transformer import composite_layer
from tfwd.layers.transformer.composite_layer import built
from tfwd.layers.transformer.formats.published_layer import Published
from tfwd.layers.transformer.input_checks import InputChecks
from tfwd.layers.transformer.position_mask import position_mask
from tfwd.layers.transformer.relative_positions import RelativePositions
from tfwd.layers.transformer.rms_normalization import RMSNormalization
from tfwd.layers.transformer.t5_layer import T5Layer


@keras.saving.register_keras_serializable("tfwd.transformer")
class T5Stack(Published):
    """The layers of T5's encoder or decoder, with one position bias for all layers.

    Formula: `h_0 = dropout(x)`, `h_i = layer_i(h_(i-1), bias)`. The output is `dropout(norm(h_n))`.

    Args:
        num_layers: int. Number of layers.
        num_heads, head_size, hidden_size, intermediate_size, activation, gated, dropout, epsilon,
            initializer: As in `T5Layer`.
        is_decoder: bool. Each position attends only to itself and to earlier positions, and the
            layers also attend to a context. Default False.
        num_buckets, max_distance: As in `RelativePositions`.
        return_all: bool. Returns all hidden states: `h_0` to `h_(n-1)`, and the output. Default
            False.
        **kwargs: Arguments of every Keras layer, such as `name`.

    Call: `stack(x, context=None, mask=None, context_mask=None, training=None)`. `x` and `context`
    are `[batch, length, hidden_size]`, masks are `[batch, length]`.

    Sublayers: `relative_positions`, `layer_0`, `layer_1`, ..., `final_norm`.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.layers import transformer as T
        >>> encoder = T.T5Stack(2, num_heads=2, head_size=4, hidden_size=8, intermediate_size=16)
        >>> encoder(tf.ones([1, 3, 8])).shape
        TensorShape([1, 3, 8])

    References: Raffel et al., "Exploring the Limits of Transfer Learning" (2020).
    """

    families = ("t5",)

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_size: int,
        hidden_size: int,
        intermediate_size: int,
        is_decoder: bool = False,
        activation: str = "relu",
        gated: bool = False,
        dropout: float = 0.0,
        epsilon: float = 1e-6,
        num_buckets: int = 32,
        max_distance: int = 128,
        initializer: Any = 0.05,
        return_all: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.head_size = head_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.is_decoder = is_decoder
        self.activation = activation
        self.gated = gated
        self.dropout = dropout
        self.epsilon = epsilon
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.initializer = composite_layer.initializer(initializer)
        self.return_all = return_all
        self.relative_positions = self.inner(
            RelativePositions,
            num_heads,
            num_buckets,
            max_distance,
            bidirectional=not is_decoder,
            initializer=self.initializer,
            name="relative_positions",
        )
        self.layers = [
            self.inner(
                T5Layer,
                num_heads,
                head_size,
                hidden_size,
                intermediate_size,
                is_decoder=is_decoder,
                activation=activation,
                gated=gated,
                dropout=dropout,
                epsilon=epsilon,
                initializer=self.initializer,
                name=f"layer_{i}",
            )
            for i in range(num_layers)
        ]
        _keras.checkpointed_state.checkpoint_list(self, "layers")
        self.final_norm = self.inner(RMSNormalization, epsilon=epsilon, name="final_norm")
        self.dropped = self.inner(keras.layers.Dropout, dropout, name="dropout")

    @classmethod
    def part_of(cls, overrides: Mapping[str, Any]) -> str:
        return "decoder" if overrides.get("is_decoder") else "encoder"

    def build(self, inputs_shape: Any, context_shape: Any = None) -> None:
        hidden = (*inputs_shape[:-1], self.hidden_size)
        built(self.relative_positions, *hidden)
        for layer in self.layers:
            built(layer, *hidden)
        built(self.final_norm, *hidden)
        self.built = True

    def call(
        self,
        inputs: tf.Tensor,
        context: Any = None,
        mask: Any = None,
        context_mask: Any = None,
        training: Any = None,
    ) -> Any:
        if mask is None:
            mask = _keras.layers.get_mask(inputs)
        if context_mask is None and context is not None:
            context_mask = _keras.layers.get_mask(context)
        checked = InputChecks(self)
        if mask is not None:  # checked once for all layers
            mask = checked.mask("mask", mask, inputs, inputs)
        if context_mask is not None and context is not None:
            context_mask = checked.mask("context_mask", context_mask, context, inputs)
        inputs = checked.nan_if_wrong(inputs)
        attended = self._attended(inputs, mask)
        bias = self.relative_positions(inputs, inputs)
        states = [self.dropped(inputs, training=training)]
        options = {"mask": attended, "context_mask": context_mask, "position_bias": bias}
        for layer in self.layers:
            states.append(layer(states[-1], context=context, training=training, **options))
        states[-1] = self.dropped(self.final_norm(states[-1]), training=training)
        return states if self.return_all else states[-1]

    def compute_output_shape(self, inputs_shape: Any, context_shape: Any = None) -> Any:
        return [inputs_shape] * (self.num_layers + 1) if self.return_all else inputs_shape

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        mask = position_mask(mask[0] if isinstance(mask, (list, tuple)) else mask)
        return [mask] * (self.num_layers + 1) if self.return_all else mask

    def _attended(self, inputs: tf.Tensor, mask: Any) -> Any:
        """Returns the mask of the positions that each position attends to."""
        if not self.is_decoder:
            return mask
        positions = tf.range(tf.shape(inputs)[1])
        before = (positions[None, :] <= positions[:, None])[None]
        if mask is None:
            return before
        return before & (mask if mask.shape.rank == 3 else mask[:, None, :])
