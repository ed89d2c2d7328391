"""`T5`: an encoder, a decoder, and a head with tied or separate weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfwd.layers.tied_dense import TiedDense
from tfwd.layers.transformer import composite_layer
from tfwd.layers.transformer.composite_layer import built
from tfwd.layers.transformer.formats.published_layer import Published
from tfwd.layers.transformer.input_checks import InputChecks
from tfwd.layers.transformer.t5_stack import T5Stack
from tfwd.layers.transformer.token_id_inputs import TokenIdInputs


@keras.saving.register_keras_serializable("tfwd.transformer")
class T5(TokenIdInputs, Published):
    """The text-to-text model T5: logits of the next token of one text, given another text.

    Formula: `c = encoder(E[ids])`, `h = decoder(E[decoder_ids], c)`. The logits are
    `E h / sqrt(hidden_size)` if the head is tied to the embeddings `E`, else `W h`.

    Version 5 of Hugging Face's `transformers` writes a wrong config for models of T5 1.1. The
    config says that the head is tied, but the file has a separate head. Load such a model with
    `tied=False`.

    Args:
        vocabulary_size: int. Number of token ids.
        num_layers: int. Number of the encoder's layers.
        num_decoder_layers: int. Number of the decoder's layers. Default None, for `num_layers`.
        num_heads, head_size, hidden_size, intermediate_size, activation, gated, dropout, epsilon,
            num_buckets, max_distance, initializer: As in `T5Stack`.
        tied: bool. Uses the embeddings' matrix as the head. Default True.
        scaled: bool. Divides the head's input by the square root of `hidden_size`. Default None,
            for `tied`.
        padding_id: int. Id of padding tokens. Default 0.
        start_id: int. The decoder's first id, for `shifted`. With None, each call of `shifted`
            needs an id. Default 0.
        return_all: bool. Returns all hidden states. Default False.
        **kwargs: Arguments of every Keras layer, such as `name`.

    Call: `t5(ids, decoder_input_ids, mask=None, decoder_mask=None, training=None)`. Ids are
    integers `[batch, length]`. Only the ids can be positional arguments. The default mask is
    `ids != padding_id`. The decoder has no default mask, because no position before a token is
    padding. `t5.shifted(labels)` returns the decoder's ids for labels. A dict can replace the ids:
    `t5({"input_ids": ..., "attention_mask": ..., "decoder_input_ids": ...})`.

    Output: logits `[batch, length of the decoder, vocabulary_size]`. With `return_all` a dict:
    "logits", "encoder_last_hidden_state", "encoder_hidden_states", "decoder_hidden_states".

    Sublayers: `shared` (an `Embedding`), `encoder`, `decoder` and `head`.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.layers import transformer as T
        >>> sizes = {"num_heads": 2, "head_size": 4, "hidden_size": 8, "intermediate_size": 16}
        >>> t5 = T.T5(vocabulary_size=50, num_layers=2, **sizes)
        >>> t5(tf.constant([[7, 8, 1]]), tf.constant([[0, 9]])).shape
        TensorShape([1, 2, 50])

    References: Raffel et al., "Exploring the Limits of Transfer Learning" (2020).
    """

    families = ("t5",)
    positional = 2
    argument_of_key: ClassVar[dict[str, str]] = {
        **{"input_ids": "", "encoder_token_ids": ""},
        **{"attention_mask": "mask", "encoder_padding_mask": "mask"},
        **{"decoder_input_ids": "decoder_input_ids", "decoder_token_ids": "decoder_input_ids"},
        **{"decoder_attention_mask": "decoder_mask", "decoder_padding_mask": "decoder_mask"},
    }
    renamed_arguments: ClassVar[dict[str, str]] = {"decoder_ids": "decoder_input_ids"}

    def __init__(
        self,
        vocabulary_size: int,
        num_layers: int,
        num_heads: int,
        head_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_decoder_layers: int | None = None,
        activation: str = "relu",
        gated: bool = False,
        tied: bool = True,
        scaled: bool | None = None,
        padding_id: int | None = 0,
        dropout: float = 0.0,
        epsilon: float = 1e-6,
        num_buckets: int = 32,
        max_distance: int = 128,
        initializer: Any = 0.05,
        return_all: bool = False,
        start_id: int | None = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.vocabulary_size = vocabulary_size
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.head_size = head_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_decoder_layers = num_decoder_layers
        self.activation = activation
        self.gated = gated
        self.tied = tied
        self.scaled = scaled
        self.padding_id = padding_id
        self.start_id = start_id
        self.dropout = dropout
        self.epsilon = epsilon
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.initializer = composite_layer.initializer(initializer)
        self.return_all = return_all
        self.shared = self.inner(
            keras.layers.Embedding,
            vocabulary_size,
            hidden_size,
            embeddings_initializer=self.initializer,
            name="shared",
        )
        self.encoder = self._stack("encoder", num_layers)
        self.decoder = self._stack("decoder", num_decoder_layers or num_layers)
        if tied:
            self.head = self.inner(TiedDense, self.shared, use_bias=False, name="head")
        else:
            self.head = self.dense(vocabulary_size, "head", use_bias=False)

    def build(self, inputs_shape: Any, decoder_input_ids_shape: Any = None) -> None:
        inputs_shape = self.argument_value(inputs_shape)
        built(self.shared, *inputs_shape)
        for layer in (self.encoder, self.decoder, self.head):
            built(layer, *inputs_shape, self.hidden_size)
        self.built = True

    def call(
        self,
        inputs: Any,
        decoder_input_ids: Any = None,
        *,
        mask: Any = None,
        decoder_mask: Any = None,
        training: Any = None,
    ) -> Any:
        mask = None if isinstance(mask, Mapping) else mask  # a dict is Keras's masks of the inputs
        ids, given = self.unpacked(
            inputs, decoder_input_ids=decoder_input_ids, mask=mask, decoder_mask=decoder_mask
        )
        mask, decoder_mask = given["mask"], given["decoder_mask"]
        if given["decoder_input_ids"] is None:
            raise ValueError(
                f"T5 '{self.name}' needs decoder_input_ids: pass the tokens before the predicted "
                "tokens, for example t5.shifted(labels)"
            )
        checked = InputChecks(self)
        ids = checked.ids("ids", ids, self.vocabulary_size)
        decoder_ids = given["decoder_input_ids"]
        decoder_ids = checked.ids("decoder_input_ids", decoder_ids, self.vocabulary_size)
        if mask is None and self.padding_id is not None:
            mask = tf.not_equal(ids, self.padding_id)
        elif mask is not None:
            mask = checked.mask("mask", mask, ids, ids)
        if decoder_mask is not None:
            decoder_mask = checked.mask("decoder_mask", decoder_mask, decoder_ids, decoder_ids)
        embedded = checked.nan_if_wrong(self.shared(ids))
        encoded = self.encoder(embedded, mask=mask, training=training)
        if mask is not None and mask.shape.rank == 3:
            mask = tf.reduce_any(mask, axis=1)  # positions that any position attends to
        decoded = self.decoder(
            self.shared(decoder_ids),
            context=encoded[-1],
            mask=decoder_mask,
            context_mask=mask,
            training=training,
        )
        last = decoded[-1]
        if self.tied if self.scaled is None else self.scaled:
            last *= tf.constant(self.hidden_size**-0.5, last.dtype)
        logits = self.head(last)
        if not self.return_all:
            return logits
        return {
            "logits": logits,
            "encoder_last_hidden_state": encoded[-1],
            "encoder_hidden_states": encoded,
            "decoder_hidden_states": decoded,
        }

    def shifted(self, labels: tf.Tensor, start_id: int | None = None) -> tf.Tensor:
        """Returns the decoder's ids for labels: at each position the previous label.

        Args:
            labels: Integers `[batch, length]`. Labels of -100, which losses ignore, become
                `padding_id`, or `start_id` if there is no padding id.
            start_id: int. Id at the first position. Default None, for the layer's `start_id`. A
                published config calls it `decoder_start_token_id`.

        Raises:
            ValueError: If neither the call nor the layer has an id for the first position.
        """
        start_id = self.start_id if start_id is None else start_id
        if start_id is None:
            raise ValueError(
                f"T5 '{self.name}' has no start_id, because its config has no "
                "decoder_start_token_id: pass an id, for example t5.shifted(labels, start_id=0)"
            )
        padding = start_id if self.padding_id is None else self.padding_id
        labels = tf.convert_to_tensor(labels)
        labels = tf.where(tf.equal(labels, -100), tf.cast(padding, labels.dtype), labels)
        start = tf.fill([tf.shape(labels)[0], 1], tf.cast(start_id, labels.dtype))
        return tf.concat([start, labels[:, :-1]], axis=1)

    def compute_mask(self, inputs: Any, mask: Any = None) -> None:
        """Returns None: the decoder's positions have no mask."""

    def compute_output_shape(self, inputs_shape: Any, decoder_input_ids_shape: Any = None) -> Any:
        if decoder_input_ids_shape is None:
            decoder_input_ids_shape = self.argument_value(inputs_shape, "decoder_input_ids")
        inputs_shape = self.argument_value(inputs_shape)
        after = tuple(decoder_input_ids_shape or inputs_shape)
        logits = (*after, self.vocabulary_size)
        if not self.return_all:
            return logits
        ours, theirs = (*inputs_shape, self.hidden_size), (*after, self.hidden_size)
        return {
            "logits": logits,
            "encoder_last_hidden_state": ours,
            "encoder_hidden_states": [ours] * (self.num_layers + 1),
            "decoder_hidden_states": [theirs] * ((self.num_decoder_layers or self.num_layers) + 1),
        }

    def any_input_shape(self) -> tuple:
        return (None, None)

    def _stack(self, name: str, num_layers: int) -> T5Stack:
        given = {key: getattr(self, key) for key in T5Stack.arguments() if hasattr(self, key)}
        given |= {"num_layers": num_layers, "is_decoder": name == "decoder", "return_all": True}
        return self.inner(T5Stack, **given, name=name)
