"""`T5`: an encoder and a decoder with a head, tied to the embeddings or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfwd.layers.tied_dense import TiedDense
from tfwd.layers.transformer import composite
from tfwd.layers.transformer.composite import built
from tfwd.layers.transformer.inputs import Inputs, OfIds
from tfwd.layers.transformer.published import Published
from tfwd.layers.transformer.t5_stack import T5Stack


@keras.saving.register_keras_serializable("tfwd.transformer")
class T5(OfIds, Published):
    """The text-to-text model T5: logits of the next token of one text, given another.

    Formula: `c = encoder(E[ids])`, `h = decoder(E[decoder_ids], c)`; the logits are
    `E h / sqrt(hidden_size)` if the head is tied to the embeddings `E`, and `W h` else.

    A model of version 1.1 that Hugging Face's version 5 has saved says in its config that it is
    tied, and its file has another head: load it with `tied=False`.

    Args:
        vocabulary_size: the number of token ids.
        num_layers: the number of the encoder's layers.
        num_decoder_layers: that of the decoder's; None for as many.
        num_heads, head_size, hidden_size, intermediate_size, activation, gated, dropout, epsilon,
            num_buckets, max_distance, initializer: as in `T5Stack`.
        tied: whether the head is the embeddings' matrix.
        scaled: whether what the head is given is divided by the root of `hidden_size`; None: if it
            is tied.
        padding_id: the id of tokens that are no text.
        start_id: the decoder's first id, for `shifted`; None: `shifted` must be given one.
        return_all: whether all hidden states are returned.
        **kwargs: as for any layer.

    Call: `t5(ids, decoder_input_ids, mask=None, decoder_mask=None, training=None)`. Ids are
    integers, `[batch, places]`. Only the ids may be given by position. The mask is by default `ids
    != padding_id`; the decoder's is none, since what is before a place is no padding.
    `t5.shifted(labels)` gives the decoder's ids for labels. A dict may take the place of the ids:
    `t5({"input_ids": ..., "attention_mask": ..., "decoder_input_ids": ...})`.

    Output: logits, `[batch, places of the decoder, vocabulary_size]`. With `return_all` a dict:
    "logits", "encoder_last_hidden_state", "encoder_hidden_states", "decoder_hidden_states".

    The layers that it holds are `shared` (an `Embedding`), `encoder`, `decoder` and `head`.

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
    names: ClassVar[dict[str, str]] = {
        **{"input_ids": "", "encoder_token_ids": ""},
        **{"attention_mask": "mask", "encoder_padding_mask": "mask"},
        **{"decoder_input_ids": "decoder_input_ids", "decoder_token_ids": "decoder_input_ids"},
        **{"decoder_attention_mask": "decoder_mask", "decoder_padding_mask": "decoder_mask"},
    }
    former: ClassVar[dict[str, str]] = {"decoder_ids": "decoder_input_ids"}

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
        self.initializer = composite.initializer(initializer)
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
        inputs_shape = self.ids_of(inputs_shape)
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
        mask = None if isinstance(mask, Mapping) else mask  # what Keras has found in a dict
        ids, given = self.unpacked(
            inputs, decoder_input_ids=decoder_input_ids, mask=mask, decoder_mask=decoder_mask
        )
        mask, decoder_mask = given["mask"], given["decoder_mask"]
        if given["decoder_input_ids"] is None:
            raise ValueError(
                f"T5 '{self.name}' got no decoder_input_ids: give those before the tokens that are "
                "predicted, as t5.shifted(labels)"
            )
        checked = Inputs(self)
        ids = checked.ids("ids", ids, self.vocabulary_size)
        decoder_ids = given["decoder_input_ids"]
        decoder_ids = checked.ids("decoder_input_ids", decoder_ids, self.vocabulary_size)
        if mask is None and self.padding_id is not None:
            mask = tf.not_equal(ids, self.padding_id)
        elif mask is not None:
            mask = checked.mask("mask", mask, ids, ids)
        if decoder_mask is not None:
            decoder_mask = checked.mask("decoder_mask", decoder_mask, decoder_ids, decoder_ids)
        embedded = checked.marked(self.shared(ids))
        encoded = self.encoder(embedded, mask=mask, training=training)
        if mask is not None and mask.shape.rank == 3:
            mask = tf.reduce_any(mask, axis=1)  # what any place of the encoder sees
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
        """Returns the decoder's ids for labels: at each position the label before it.

        Args:
            labels: integers, `[batch, places]`. Those of -100, which losses leave out, become
                `padding_id`, or `start_id` if there is none.
            start_id: the id at the first position. By default the layer's `start_id`, which is
                `decoder_start_token_id` of a published config.

        Raises:
            ValueError: neither the call nor the layer has an id for the first position.
        """
        start_id = self.start_id if start_id is None else start_id
        if start_id is None:
            raise ValueError(
                f"T5 '{self.name}' has no start_id, because its config has no "
                "decoder_start_token_id: give one, as t5.shifted(labels, start_id=0)"
            )
        padding = start_id if self.padding_id is None else self.padding_id
        labels = tf.convert_to_tensor(labels)
        labels = tf.where(tf.equal(labels, -100), tf.cast(padding, labels.dtype), labels)
        start = tf.fill([tf.shape(labels)[0], 1], tf.cast(start_id, labels.dtype))
        return tf.concat([start, labels[:, :-1]], axis=1)

    def compute_mask(self, inputs: Any, mask: Any = None) -> None:
        """The decoder's places have no mask."""

    def compute_output_shape(self, inputs_shape: Any, decoder_input_ids_shape: Any = None) -> Any:
        if decoder_input_ids_shape is None:
            decoder_input_ids_shape = self.ids_of(inputs_shape, "decoder_input_ids")
        inputs_shape = self.ids_of(inputs_shape)
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
