"""`TiedDense`: logits over a vocabulary, computed with the embedding's matrix."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras


@keras.saving.register_keras_serializable("tfwd")
class TiedDense(keras.layers.Layer):
    """A dense output layer with tied weights: the transpose of an embedding, plus a bias.

    Formula: `y = x E^T + b`. `E` is the embedding's own matrix `[words, features]`, not a copy. If
    the embedding has dropout, this layer still uses the raw matrix. The matrix gets gradients from
    both uses.

    Args:
        embedding: `keras.layers.Embedding`, `DropoutEmbedding`, or a wrapper of tfwd around an
            embedding. If it is not built yet, this layer builds it.
        use_bias: bool. Adds one bias per word. Default True.
        bias_initializer: Initializer of the bias. Default "zeros".
        **kwargs: Arguments of every Keras layer, such as `name`.

    Input: `[..., features]`. Output: `[..., words]`.

    Raises:
        ValueError: If `embedding` is not an embedding, or if the input's last axis does not have
            the embedding's width.

    The embedding is a sublayer. Its matrix is in the `weights` of both layers, and once in the
    weights of a model. A clone from a config (`clone_model`, `from_config`) gets its own embedding,
    as with any object that Keras layers share. A warning reports it. A `.keras` file keeps the tie.

    Example:
        >>> import keras, tensorflow as tf
        >>> from tfwd import layers
        >>> embedding = keras.layers.Embedding(10, 4)
        >>> decoder = layers.TiedDense(embedding)
        >>> decoder(embedding(tf.constant([[1, 2]]))).shape
        TensorShape([1, 2, 10])
        >>> [tuple(w.shape) for w in decoder.weights], decoder.weights[1] is embedding.embeddings
        ([(10,), (10, 4)], True)

    References: Inan et al., "Tying Word Vectors and Word Classifiers" (2016); Press and Wolf,
    "Using the Output Embedding to Improve Language Models" (2016).
    """

    def __init__(
        self,
        embedding: keras.layers.Layer,
        use_bias: bool = True,
        bias_initializer: Any = "zeros",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        inner = embedding
        while isinstance(inner, keras.layers.Wrapper):
            inner = inner.layer
        if not isinstance(inner, keras.layers.Embedding):
            raise ValueError(
                f"TiedDense '{self.name}': expected an Embedding layer, got "
                f"{embedding!r} of type {type(embedding).__name__}"
            )
        self.supports_masking = True
        self.embedding = inner
        self.use_bias = use_bias
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.bias: Any = None
        self._leading: tuple = (None,)

    def build(self, input_shape: Any) -> None:
        if not self.embedding.built:
            self.embedding.build(None)
        words, features = self.embedding.input_dim, self.embedding.output_dim
        if input_shape[-1] is not None and input_shape[-1] != features:
            raise ValueError(
                f"TiedDense '{self.name}' is tied to an embedding of width {features}, and its "
                f"input's last axis must have that size; got an input of shape {tuple(input_shape)}"
            )
        self._leading = tuple(input_shape[:-1])
        if self.use_bias:
            self.bias = self.add_weight(
                shape=(words,), initializer=self.bias_initializer, name="bias"
            )
        self.built = True

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        matrix = tf.cast(tf.convert_to_tensor(self.embedding.embeddings), self.compute_dtype)
        # One product of two matrices, for any number of leading axes.
        flat = tf.reshape(inputs, [-1, self.embedding.output_dim])
        logits = tf.matmul(flat, matrix, transpose_b=True)
        if self.bias is not None:
            logits = tf.nn.bias_add(logits, tf.convert_to_tensor(self.bias))
        leading = tf.shape(inputs)[:-1]
        outputs = tf.reshape(logits, tf.concat([leading, [self.embedding.input_dim]], axis=0))
        outputs.set_shape([*inputs.shape[:-1], self.embedding.input_dim])
        return outputs

    def compute_output_shape(self, input_shape: Any) -> tuple:
        return (*input_shape[:-1], self.embedding.input_dim)

    def unwrapped(self) -> keras.layers.EinsumDense:
        """Returns a plain `keras.layers.EinsumDense` on the same variables."""
        words = self.embedding.input_dim
        dense = keras.layers.EinsumDense(
            "...f,wf->...w",
            output_shape=(words,),
            bias_axes="w" if self.use_bias else None,
            name=self.name,
            dtype=self.dtype_policy,
        )
        matrix = _keras.layers.embedding_matrix(self.embedding)
        return _keras.copies.tie(dense, matrix, self.bias, (*self._leading, words))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "embedding": _keras.copies.serialize(self.embedding),
            "use_bias": self.use_bias,
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TiedDense:
        embedding = _keras.copies.deserialize(config["embedding"])
        if not _keras.copies.keeps_sharing():
            warnings.warn(
                f"TiedDense '{config.get('name')}' is made from a config and has its own "
                f"embedding. It is not tied to another layer '{embedding.name}', because "
                "clone_model and from_config keep no shared layers. Save and load a .keras file to "
                "keep the tie",
                stacklevel=2,
            )
        return cls(**{**config, "embedding": embedding})
