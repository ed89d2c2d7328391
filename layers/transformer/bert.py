"""`Bert`: a complete encoder, for all model families that are built like BERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import keras

from tfwd import _keras
from tfwd.layers.transformer import composite_layer
from tfwd.layers.transformer.composite_layer import Composite, built
from tfwd.layers.transformer.embeddings import Embeddings
from tfwd.layers.transformer.formats.published_layer import Published
from tfwd.layers.transformer.input_checks import InputChecks
from tfwd.layers.transformer.pooler import Pooler
from tfwd.layers.transformer.position_mask import position_mask
from tfwd.layers.transformer.token_id_inputs import TokenIdInputs
from tfwd.layers.transformer.transformer_stack import TransformerStack


@keras.saving.register_keras_serializable("tfwd.transformer")
class Bert(TokenIdInputs, Published):
    """A BERT encoder: embeddings, a stack of transformer layers, and optionally a pooler.

    Formula: `h_0 = embeddings(ids)`, `h_i = layer_i(h_(i-1))`, `pooled = tanh(h_n[:, 0] W + b)`.

    `Bert.from_pretrained(folder)` loads a published model: BERT, RoBERTa, DistilBERT, ELECTRA,
    ALBERT, data2vec-text or ERNIE without task ids. The config's `model_type` selects the family.

    Args:
        vocabulary_size, max_length, type_vocabulary_size, embedding_size, padding_id,
            padding_position, project: As in `Embeddings`.
        hidden_size, num_layers, num_heads, intermediate_size, activation, dropout,
            attention_dropout, epsilon, initializer, num_shared: As in `TransformerStack`.
        add_pooler: bool. Adds a pooler and its weights. Default False.
        return_all: bool. Returns all hidden states. Default False.
        **kwargs: Arguments of every Keras layer, such as `name`.

    Call: `bert(ids, token_type_ids=None, mask=None, position_ids=None, training=None)`. Only the
    ids can be a positional argument. Ids are integers `[batch, length]`. `mask` is the attention
    mask of tokenizers: `[batch, length]` or `[batch, length, length]`, with True or 1 for text. The
    default is `ids != padding_id`.

    A dict can replace the ids:
    `bert({"input_ids": ..., "attention_mask": ..., "token_type_ids": ...})`. These are the keys of
    Hugging Face's tokenizers. keras-hub's keys "token_ids", "padding_mask" and "segment_ids" work
    too.

    Wrong ids and masks raise an error. A function that XLA compiles cannot raise an error. Its
    outputs become NaN.

    Output: the last hidden state, `[batch, length, hidden_size]`. With `add_pooler` or `return_all`
    a dict: "last_hidden_state"; "pooler_output", `[batch, hidden_size]`; "hidden_states", a list of
    `num_layers + 1` tensors.

    Sublayers: `embeddings`, `stack` and `pooler`.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.layers import transformer as T
        >>> bert = T.Bert(100, hidden_size=8, num_layers=2, num_heads=2, intermediate_size=16)
        >>> bert(tf.constant([[2, 7, 3, 0]])).shape
        TensorShape([1, 4, 8])

    References: Devlin et al., "BERT" (2019); Liu et al., "RoBERTa" (2019); Sanh et al.,
    "DistilBERT" (2019); Sun et al., "ERNIE" (2019); Clark et al., "ELECTRA" (2020); Lan et al.,
    "ALBERT" (2020); Baevski et al., "data2vec" (2022). Without a mask Hugging Face's classes attend
    to padding, with a warning; this layer does not.
    """

    argument_of_key: ClassVar[dict[str, str]] = {
        **Embeddings.argument_of_key,
        **{"attention_mask": "mask", "padding_mask": "mask"},
    }
    renamed_arguments = Embeddings.renamed_arguments

    def __init__(
        self,
        vocabulary_size: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        intermediate_size: int,
        max_length: int = 512,
        type_vocabulary_size: int = 2,
        embedding_size: int | None = None,
        padding_id: int | None = 0,
        padding_position: int | None = None,
        activation: str = "gelu",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        epsilon: float = 1e-12,
        initializer: Any = 0.02,
        num_shared: int | None = None,
        add_pooler: bool = False,
        return_all: bool = False,
        project: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.vocabulary_size = vocabulary_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.intermediate_size = intermediate_size
        self.max_length = max_length
        self.type_vocabulary_size = type_vocabulary_size
        self.embedding_size = embedding_size
        self.padding_id = padding_id
        self.padding_position = padding_position
        self.activation = activation
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.epsilon = epsilon
        self.initializer = composite_layer.initializer(initializer)
        self.num_shared = num_shared
        self.add_pooler = add_pooler
        self.return_all = return_all
        self.project = project
        self.embeddings = self._part(Embeddings, "embeddings")
        self.stack = self._part(TransformerStack, "stack", return_all=True)
        self.pooler = self._part(Pooler, "pooler") if add_pooler else None

    def build(self, input_shape: Any) -> None:
        input_shape = self.argument_value(input_shape)
        hidden = (*input_shape, self.hidden_size)
        built(self.embeddings, *input_shape)
        built(self.stack, *hidden)
        if self.pooler is not None:
            built(self.pooler, *hidden)
        self.built = True

    def call(
        self,
        inputs: Any,
        *,
        token_type_ids: Any = None,
        mask: Any = None,
        position_ids: Any = None,
        training: Any = None,
    ) -> Any:
        given = {"token_type_ids": token_type_ids, "position_ids": position_ids}
        mask = None if isinstance(mask, Mapping) else mask  # a dict is Keras's masks of the inputs
        ids, given = self.unpacked(inputs, mask=mask, **given)
        mask = given.pop("mask")
        embedded = self.embeddings(ids, **given, training=training)
        if mask is None:
            mask = self.embeddings.compute_mask(ids)
        else:
            checked = InputChecks(self)
            mask = checked.mask("mask", mask, embedded, embedded)
            embedded = checked.nan_if_wrong(embedded)
        states = self.stack(embedded, mask=mask, training=training)
        # Also attach a mask that was an argument, because Keras does not. Attach only masks of
        # positions.
        if mask is not None and mask.shape.rank == 2:
            for state in states:
                _keras.layers.set_mask(state, mask)
        if not self.add_pooler and not self.return_all:
            return states[-1]
        outputs = {"last_hidden_state": states[-1]}
        if self.pooler is not None:
            outputs["pooler_output"] = self.pooler(states[-1])
        if self.return_all:
            outputs["hidden_states"] = states
        return outputs

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Returns True where a token is not padding."""
        if isinstance(mask, Mapping):
            mask = None
        if mask is None:
            mask = self.argument_value(inputs, "mask")
            mask = self.embeddings.compute_mask(inputs) if mask is None else mask
        mask = position_mask(mask)
        if not self.add_pooler and not self.return_all:
            return mask
        masks: dict[str, Any] = {"last_hidden_state": mask}
        if self.add_pooler:
            masks["pooler_output"] = None
        if self.return_all:
            masks["hidden_states"] = [mask] * (self.num_layers + 1)
        return masks

    def compute_output_shape(self, input_shape: Any) -> Any:
        input_shape = self.argument_value(input_shape)
        hidden = (*input_shape, self.hidden_size)
        if not self.add_pooler and not self.return_all:
            return hidden
        shapes: dict[str, Any] = {"last_hidden_state": hidden}
        if self.add_pooler:
            shapes["pooler_output"] = (input_shape[0], self.hidden_size)
        if self.return_all:
            shapes["hidden_states"] = [hidden] * (self.num_layers + 1)
        return shapes

    def any_input_shape(self) -> tuple:
        return (None, None)

    def _part(self, kind: type[Composite], name: str, **further: Any) -> Any:
        """Creates a sublayer from this layer's arguments that the sublayer also has."""
        given = {key: getattr(self, key) for key in kind.arguments() if hasattr(self, key)}
        return self.inner(kind, **{**given, **further}, name=name)
