"""`BiModalEncoder`: two streams of layers that look at each other in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers.transformer import composite
from tfwd.layers.transformer.activations import activation as activation_of
from tfwd.layers.transformer.attention import Attention
from tfwd.layers.transformer.composite import Composite, built
from tfwd.layers.transformer.inputs import Inputs, of_places
from tfwd.layers.transformer.stack import TransformerStack


@keras.saving.register_keras_serializable("tfwd.transformer")
class Connection(Composite):
    """One stream looks at the other: what each of a pair of connections computes.

    Formula: as a `TransformerLayer`'s, but that keys and values are of the other stream:

        a = LayerNorm(x + dropout(attention(x, context)))
        y = LayerNorm(a + dropout(f(a W_1 + b_1) W_2 + b_2))

    Args:
        num_heads, head_size: as in `Attention`.
        hidden_size: the width of the stream.
        intermediate_size, activation, dropout, attention_dropout, epsilon, initializer: as in
            `TransformerLayer`.
        **kwargs: as for any layer.

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
        self.num_heads = num_heads
        self.head_size = head_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = activation
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.epsilon = epsilon
        self.initializer = composite.initializer(initializer)
        self._function = activation_of(activation)
        self.attention = self.inner(
            Attention,
            num_heads,
            head_size,
            hidden_size,
            dropout=attention_dropout,
            initializer=self.initializer,
            name="attention",
        )
        self.attention_norm = self.norm("attention_LayerNorm")
        self.intermediate = self.dense(intermediate_size, "intermediate")
        self.output_dense = self.dense(hidden_size, "output")
        self.output_norm = self.norm("LayerNorm")
        self.dropped = self.inner(keras.layers.Dropout, dropout, name="dropout")

    def build(self, inputs_shape: Any, context_shape: Any = None) -> None:
        _keras.layers.build(self.attention, inputs_shape, context_shape or inputs_shape)
        built(self.attention_norm, *inputs_shape)
        built(self.intermediate, *inputs_shape)
        built(self.output_dense, *inputs_shape[:-1], self.intermediate_size)
        built(self.output_norm, *inputs_shape)
        self.built = True

    def call(
        self, inputs: tf.Tensor, context: tf.Tensor, context_mask: Any = None, training: Any = None
    ) -> tf.Tensor:
        attended = self.attention(inputs, context, context_mask=context_mask, training=training)
        attended = self.attention_norm(inputs + self.dropped(attended, training=training))
        outputs = self.output_dense(self._function(self.intermediate(attended)))
        return self.output_norm(attended + self.dropped(outputs, training=training))

    def compute_output_shape(self, inputs_shape: Any, context_shape: Any = None) -> Any:
        return inputs_shape


@keras.saving.register_keras_serializable("tfwd.transformer")
class BiModalEncoder(Composite):
    """Two stacks of transformer layers, as for text and image, with connections in between.

    Formula: for each pair `(i, j)` of `connections`, in their order, the first stream runs up to
    its layer i, the second up to j, and then each has a `Connection` to what the other then is. The
    layers after the last connection follow.

    Args:
        first, second: a `TransformerStack` each. They may come from published models, and the
            widths may differ.
        connections: pairs of how many layers of each stream are before a connection; both numbers
            rise.
        num_heads, head_size: of the connections' attention; by default the first stack's.
        dropout, attention_dropout: of the connections.
        **kwargs: as for any layer.

    Call: `encoder(x, y, first_mask=None, second_mask=None, training=None)`, `[batch, places,
    hidden_size]` of either. Output: a pair of the same shapes.

    The layers that it holds are the two stacks, by their names, and of each connection
    `first_to_second_0` and `second_to_first_0`, ... To fill an encoder that is built, of stacks
    that are named "first" and "second", by the weights of one text model:
    `tfwd.pretrained.load(encoder, folder, mapping={**T.mapping(folder, at="first"),
    **T.mapping(folder, at="second")}, ignore=["embeddings.*", "pooler.*"],
    allow_missing=".*_to_.*")`.

    Raises:
        ValueError: a connection is past a stack's end, or comes before the one before it.

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
                    f"{tuple(before)}: the stacks have {ends[0]} and {ends[1]} layers, and each "
                    "connection comes after the one before it"
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
        _keras.variables.checkpoint_list(self, "_held")

    def build(self, inputs_shape: Any, other_shape: Any = None) -> None:
        shapes = [(*inputs_shape[:-1], stack.hidden_size) for stack in (self.first, self.second)]
        for stack, shape in zip((self.first, self.second), shapes, strict=True):
            if not stack.built:
                built(stack, *shape)
        for one, other in self.looks:
            _keras.layers.build(one, shapes[0], shapes[1])
            _keras.layers.build(other, shapes[1], shapes[0])
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
        checked = Inputs(self)
        if first_mask is not None:
            first_mask = checked.mask("first_mask", first_mask, inputs, inputs)
        if second_mask is not None:
            second_mask = checked.mask("second_mask", second_mask, other, other)
        x, y, at = checked.marked(inputs), checked.marked(other), [0, 0]
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
        """Each stream keeps its mask."""
        masks = mask if isinstance(mask, (list, tuple)) else (mask, None)
        return tuple(map(of_places, masks))

    def get_config(self) -> dict[str, Any]:
        stacks = {"first": self.first, "second": self.second}
        return {
            **super().get_config(),
            **{name: _keras.configs.serialize(stack) for name, stack in stacks.items()},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BiModalEncoder:
        stacks = {name: _keras.configs.deserialize(config[name]) for name in ("first", "second")}
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
