"""`Embeddings`: the sum of word, position and token type embeddings."""

from __future__ import annotations

from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers.transformer import composite_layer
from tfwd.layers.transformer.composite_layer import built
from tfwd.layers.transformer.formats.published_layer import Published
from tfwd.layers.transformer.input_checks import InputChecks
from tfwd.layers.transformer.token_id_inputs import TokenIdInputs


@keras.saving.register_keras_serializable("tfwd.transformer")
class Embeddings(TokenIdInputs, Published):
    """Input embeddings of a transformer: words, positions and token types, summed and normalized.

    Formula: `e = dropout(LayerNorm(words[id] + positions[position] + types[type]))`. With a
    projection the output is `e P + p`.

    Args:
        vocabulary_size: int. Number of token ids.
        hidden_size: int. Width of the output.
        max_length: int. Number of positions. Default 512.
        type_vocabulary_size: int. Number of token types. 0 means none. Default 2.
        embedding_size: int. Width of the three tables. Default None, for `hidden_size`.
        padding_id: int. Id of padding tokens, for the mask. None means no mask. Default 0.
        padding_position: int. Position of padding tokens. Default None: all tokens, including
            padding, have the positions 0, 1, 2, ... With a number n, as in RoBERTa, padding has
            position n. The other tokens have the positions n + 1, n + 2, ...
        dropout: float. Dropout rate of the sum. Default 0.
        epsilon: float. Epsilon of the normalization. Default 1e-12.
        initializer: Initializer of the tables. A float is the standard deviation of a truncated
            normal distribution. Default 0.02.
        project: bool. Adds a projection to `hidden_size`. Default None, which adds a projection if
            the widths differ. ALBERT has a projection at equal widths too.
        **kwargs: Arguments of every Keras layer, such as `name`.

    Call: `layer(ids, token_type_ids=None, position_ids=None, training=None)`. Each is an integer
    tensor `[batch, length]`. Only the ids can be a positional argument. A dict with "input_ids" can
    replace the ids. By default all token types are 0. Output: `[batch, length, hidden_size]`, with
    the mask `ids != padding_id`.

    Sublayers: `words`, `positions`, `types` (each an `Embedding`), `LayerNorm` and `projection` (a
    `Dense`).

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.layers import transformer as T
        >>> embeddings = T.Embeddings(vocabulary_size=100, hidden_size=8, max_length=16)
        >>> embeddings(tf.constant([[2, 7, 3]])).shape
        TensorShape([1, 3, 8])

    References: Devlin et al., "BERT" (2019); Liu et al., "RoBERTa" (2019), for `padding_position`;
    Lan et al., "ALBERT" (2020), for `embedding_size`.
    """

    part = "embeddings"
    argument_of_key: ClassVar[dict[str, str]] = {
        **{"input_ids": "", "token_ids": ""},
        **{"token_type_ids": "token_type_ids", "segment_ids": "token_type_ids"},
        "position_ids": "position_ids",
    }
    renamed_arguments: ClassVar[dict[str, str]] = {"type_ids": "token_type_ids"}

    def __init__(
        self,
        vocabulary_size: int,
        hidden_size: int,
        max_length: int = 512,
        type_vocabulary_size: int = 2,
        embedding_size: int | None = None,
        padding_id: int | None = 0,
        padding_position: int | None = None,
        dropout: float = 0.0,
        epsilon: float = 1e-12,
        initializer: Any = 0.02,
        project: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.vocabulary_size = vocabulary_size
        self.hidden_size = hidden_size
        self.max_length = max_length
        self.type_vocabulary_size = type_vocabulary_size
        self.embedding_size = embedding_size
        self.padding_id = padding_id
        self.padding_position = padding_position
        self.dropout = dropout
        self.epsilon = epsilon
        self.initializer = composite_layer.initializer(initializer)
        self.project = project
        self._width = embedding_size or hidden_size
        self.words = self._table(vocabulary_size, "words")
        self.positions = self._table(max_length, "positions")
        self.types = self._table(type_vocabulary_size, "types") if type_vocabulary_size else None
        self.layer_norm = self.norm("LayerNorm")
        self.dropped = self.inner(keras.layers.Dropout, dropout, name="dropout")
        self.projection = None
        if project is False and self._width != hidden_size:
            raise ValueError(
                f"Embeddings '{self.name}': project=False with embedding_size={embedding_size} and "
                f"hidden_size={hidden_size}: different widths need a projection; use project=None"
            )
        if self._width != hidden_size if project is None else project:
            self.projection = self.dense(hidden_size, "projection")

    def build(self, input_shape: Any) -> None:
        input_shape = self.argument_value(input_shape)
        for table in (self.words, self.positions, self.types):
            if table is not None:
                built(table, *input_shape)
        built(self.layer_norm, *input_shape, self._width)
        if self.projection is not None:
            built(self.projection, *input_shape, self._width)
        self.built = True

    def call(
        self,
        inputs: Any,
        *,
        token_type_ids: Any = None,
        position_ids: Any = None,
        training: Any = None,
    ) -> tf.Tensor:
        inputs, given = self.unpacked(
            inputs, token_type_ids=token_type_ids, position_ids=position_ids
        )
        types, positions = given["token_type_ids"], given["position_ids"]
        checked = InputChecks(self)
        ids = checked.ids("ids", inputs, self.vocabulary_size)
        if positions is None:
            ids = checked.length(ids, self._longest())
            positions = self._positions(ids)
        else:
            positions = checked.ids("position_ids", positions, self.max_length, like=ids)
        total = self.words(ids) + self.positions(positions)
        if self.types is not None:
            if types is not None:
                types = checked.ids("token_type_ids", types, self.type_vocabulary_size, like=ids)
            total += self.types(tf.zeros_like(ids) if types is None else types)
        elif types is not None:
            raise ValueError(
                f"Embeddings '{self.name}' has no token types (type_vocabulary_size=0): remove "
                "token_type_ids"
            )
        total = checked.nan_if_wrong(total)
        total = self.dropped(self.layer_norm(total), training=training)
        return total if self.projection is None else self.projection(total)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Returns True where a token is not padding."""
        ids = self.argument_value(inputs)
        return mask if self.padding_id is None else _keras.ops.not_equal(ids, self.padding_id)

    def compute_output_shape(self, input_shape: Any) -> tuple:
        return (*self.argument_value(input_shape), self.hidden_size)

    def any_input_shape(self) -> tuple:
        return (None, None)

    def _table(self, rows: int, name: str) -> keras.layers.Embedding:
        start = keras.initializers.get(keras.initializers.serialize(self.initializer))
        return self.inner(
            keras.layers.Embedding, rows, self._width, embeddings_initializer=start, name=name
        )

    def _longest(self) -> int:
        return self.max_length - (0 if self.padding_position is None else self.padding_position + 1)

    def _positions(self, inputs: tf.Tensor) -> tf.Tensor:
        if self.padding_position is None:
            return tf.range(tf.shape(inputs)[1])[None]
        padding = -1 if self.padding_id is None else self.padding_id
        is_text = tf.cast(tf.not_equal(inputs, padding), tf.int32)
        return tf.cumsum(is_text, axis=1) * is_text + self.padding_position
