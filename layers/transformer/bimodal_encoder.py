"""`BiModalEncoder`: two stacks of layers with attention to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers.transformer.attention import Attention
from tfwd.layers.transformer.composite_layer import Composite, built
from tfwd.layers.transformer.input_checks import InputChecks
from tfwd.layers.transformer.position_mask import position_mask
from tfwd.layers.transformer.transformer_layer import PostNormLayer
from tfwd.layers.transformer.transformer_stack import TransformerStack


@keras.saving.register_keras_serializable("tfwd.transformer")
class Connection(PostNormLayer):
    """A transformer layer in which one stream attends to the other, as in ViLBERT.

    Formula: like `TransformerLayer`, but the keys and values come from the other stream:

        a = LayerNorm(x + dropout(attention(x, context)))
        y = LayerNorm(a + dropout(f(a W_1 + b_1) W_2 + b_2))

    Args:
        num_heads, head_size: As in `Attention`.
        hidden_size: int. Width of the stream.
        intermediate_size, activation, dropout, attention_dropout, epsilon, initializer: As in
            `TransformerLayer`.
        **kwargs: Arguments of every Keras layer, such as `name`.

    Call: `layer(x, context, context_mask=None, training=None)`.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "gelu",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        epsilon: float = 1e-12,
        initializer: Any = 0.02,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.head_size = head_size
        self.add_parts(
            Attention,
            num_heads,
            head_size,
            hidden_size,
            intermediate_size,
            activation,
            dropout,
            attention_dropout,
            epsilon,
            initializer,
        )

    def build(self, inputs_shape: Any, context_shape: Any = None) -> None:
        _keras.layer_building.build(self.attention, inputs_shape, context_shape or inputs_shape)
        self.build_after_attention(inputs_shape)

    def call(
        self, inputs: tf.Tensor, context: tf.Tensor, context_mask: Any = None, training: Any = None
    ) -> tf.Tensor:
        attended = self.attention(inputs, context, context_mask=context_mask, training=training)
        return self.after_attention(inputs, attended, training)

    def compute_output_shape(self, inputs_shape: Any, context_shape: Any = None) -> Any:
        return inputs_shape


@keras.saving.register_keras_serializable("tfwd.transformer")
class BiModalEncoder(Composite):
    """Two stacks of transformer layers with connections, for example for text and images.

    Formula: the pairs `(i, j)` of `connections` are processed in order. The first stream runs its
    first i layers, and the second stream runs its first j layers. Then each stream has a
    `Connection` to the other stream's present states. The layers after the last connection follow.

    Args:
        first, second: `TransformerStack`. They can come from published models, and can have
            different widths.
        connections: Pairs of int. Number of layers that each stream has run before the connection.
            No number is smaller than in the previous pair.
        num_heads, head_size: int. Sizes of the connections' attention. Default None, for the sizes
            of the first stack.
        dropout, attention_dropout: float. Dropout rates of the connections. Default 0.
        **kwargs: Arguments of every Keras layer, such as `name`.

    Call: `encoder(x, y, first_mask=None, second_mask=None, training=None)`. `x` and `y` are
    `[batch, length, hidden_size]`. Output: a pair of the same shapes.

    Sublayers: the two stacks, by their names, and `first_to_second_0`, `second_to_first_0` and so
    on.

    One text model can fill both stacks of a built encoder, if they are named "first" and "second":

        keys = {**T.mapping(folder, at="first"), **T.mapping(folder, at="second")}
        others = {"ignore": ["embeddings.*", "pooler.*"], "allow_missing": ".*_to_.*"}
        tfwd.pretrained.load(encoder, folder, mapping=keys, **others)

    Raises:
        ValueError: If a connection is after the end of a stack, or before the previous connection.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.layers import transformer as T
        >>> text = T.TransformerStack(3, num_heads=2, hidden_size=8, intermediate_size=16)
        >>> image = T.TransformerStack(2, num_heads=1, hidden_size=6, intermediate_size=12)
        >>> encoder = T.BiModalEncoder(text, image, connections=[(2, 1), (3, 2)])
        >>> [part.shape[-1] for part in encoder(tf.ones([1, 5, 8]), tf.ones([1, 4, 6]))]
        [8, 6]

    References: Lu et al., "ViLBERT" (2019).
    """

    def __init__(
        self,
        first: TransformerStack,
        second: TransformerStack,
        connections: Sequence[Sequence[int]],
        num_heads: int | None = None,
        head_size: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.first, self.second = first, second
        self.connections = [list(pair) for pair in connections]
        self.num_heads, self.head_size = num_heads, head_size
        self.dropout, self.attention_dropout = dropout, attention_dropout
        before = [0, 0]
        for pair in self.connections:
            ends = [first.num_layers, second.num_layers]
            if len(pair) != 2 or not all(b <= n <= e for b, n, e in zip(before, pair, ends)):  # noqa: B905
                raise ValueError(
                    f"BiModalEncoder '{self.name}': connection {tuple(pair)} after "
                    f"{tuple(before)}: the stacks have {ends[0]} and {ends[1]} layers, and no "
                    "number of layers may be smaller than in the previous connection"
                )
            before = pair
        heads = num_heads or first.num_heads
        size = head_size or first.hidden_size // first.num_heads
        self.looks = [
            (
                self._connection(first, heads, size, f"first_to_second_{i}"),
                self._connection(second, heads, size, f"second_to_first_{i}"),
            )
            for i in range(len(self.connections))
        ]
        self._held = [one for pair in self.looks for one in pair]
        _keras.checkpointed_state.checkpoint_list(self, "_held")

    def build(self, inputs_shape: Any, other_shape: Any = None) -> None:
        shapes = [(*inputs_shape[:-1], stack.hidden_size) for stack in (self.first, self.second)]
        for stack, shape in zip((self.first, self.second), shapes, strict=True):
            if not stack.built:
                built(stack, *shape)
        for one, other in self.looks:
            _keras.layer_building.build(one, shapes[0], shapes[1])
            _keras.layer_building.build(other, shapes[1], shapes[0])
        self.built = True

    def call(
        self,
        inputs: tf.Tensor,
        other: tf.Tensor,
        first_mask: Any = None,
        second_mask: Any = None,
        training: Any = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        if first_mask is None:
            first_mask = _keras.layers.get_mask(inputs)
        if second_mask is None:
            second_mask = _keras.layers.get_mask(other)
        checked = InputChecks(self)
        if first_mask is not None:
            first_mask = checked.mask("first_mask", first_mask, inputs, inputs)
        if second_mask is not None:
            second_mask = checked.mask("second_mask", second_mask, other, other)
        x, y, at = checked.nan_if_wrong(inputs), checked.nan_if_wrong(other), [0, 0]
        ends = [self.first.num_layers, self.second.num_layers]
        for pair, looks in zip([*self.connections, ends], [*self.looks, None], strict=True):
            x = self.first.run(x, at[0], pair[0], first_mask, training)
            y = self.second.run(y, at[1], pair[1], second_mask, training)
            if looks is not None:
                x, y = (
                    looks[0](x, y, context_mask=second_mask, training=training),
                    looks[1](y, x, context_mask=first_mask, training=training),
                )
            at = pair
        return x, y

    def compute_output_shape(self, inputs_shape: Any, other_shape: Any) -> tuple:
        return tuple(inputs_shape), tuple(other_shape)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Returns the mask of each stream unchanged."""
        masks = mask if isinstance(mask, (list, tuple)) else (mask, None)
        return tuple(map(position_mask, masks))

    def get_config(self) -> dict[str, Any]:
        stacks = {"first": self.first, "second": self.second}
        return {
            **super().get_config(),
            **{name: _keras.copies.serialize(stack) for name, stack in stacks.items()},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BiModalEncoder:
        stacks = {name: _keras.copies.deserialize(config[name]) for name in ("first", "second")}
        return cls.with_flags(config, lambda own: cls(**{**own, **stacks}))

    def _connection(self, stack: TransformerStack, heads: int, size: int, name: str) -> Connection:
        return self.inner(
            Connection,
            heads,
            size,
            stack.hidden_size,
            stack.intermediate_size,
            activation=stack.activation,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            epsilon=stack.epsilon,
            initializer=stack.initializer,
            name=name,
        )
