"""Text classifier: a pretrained encoder, one vector of its output, and a softmax."""

from __future__ import annotations

from typing import Any

import keras
import ml_collections
import numpy as np
import tensorflow as tf

import tfwd
from tfwd import _keras
from tfwd import parametrizations as P
from tfwd.dtypes import at_least_float32
from tfwd.finetune.data.vocabulary import Vocabulary
from tfwd.finetune.resumable_dropout import Dropout
from tfwd.layers import transformer as T
from tfwd.layers.transformer.formats.published_layer import build_with_zeros, initialize_variables
from tfwd.pretrained.target_variables import targets_of
from tfwd.runs.errors import UserError
from tfwd.runs.training.layer_seeds import layer_seeds


class Classifier(keras.Model):
    """Text classifier: an encoder with a classification head.

    Formula: `logits = dropout(p) W + b`. With the encoder's last hidden states h, p is

    - "cls": `h[0]`, the first position;
    - "pooler": `tanh(h[0] V + v)`;
    - "mean": the mean of h over the positions that are not padding.

    Args:
        encoder: a `T.Bert`, with a pooler if `pooling` is "pooler". The constructor builds it.
        classes: int. The number of classes.
        pooling: "cls", "pooler" or "mean".
        dropout: float. The dropout rate of p in training.
        seed: int. Seed of the head's weights and draws.

    Call: `model(ids, training=None)`, int32 `[batch, positions]`. Output: `[batch, classes]`, in at
    least float32.

    The encoder's `initializer` initializes the head's kernel. The bias starts at 0.
    """

    built: bool  # of keras.Model

    def __init__(
        self, encoder: T.Bert, classes: int, pooling: str, dropout: float = 0.0, seed: int = 0
    ):
        super().__init__(name="classifier", dtype=encoder.dtype_policy)
        self.pooling = pooling
        row = layer_seeds(seed)
        self.encoder = encoder
        self.dropped = Dropout(dropout, next(row), name="dropout", dtype=encoder.dtype_policy)
        self.head = keras.layers.Dense(
            classes,
            kernel_initializer=keras.initializers.TruncatedNormal(
                stddev=_deviation(encoder), seed=next(row)
            ),
            name="head",
            dtype=encoder.dtype_policy,
        )
        build_with_zeros(encoder)  # pretrained weights replace most of the initial weights
        _keras.layer_building.build(self, (None, None))

    def build(self, input_shape: Any = None) -> None:
        if self.built:
            return
        _keras.layer_building.build(self.head, (None, self.encoder.hidden_size))
        self.built = True

    def call(self, ids: tf.Tensor, training: Any = None) -> tf.Tensor:
        outputs = self.encoder(ids, training=training)
        if self.pooling == "pooler":
            pooled = outputs["pooler_output"]
        elif self.pooling == "cls":
            pooled = outputs[:, 0]
        else:
            pooled = _mean(outputs, self.encoder.embeddings.compute_mask(ids))
        return at_least_float32(self.head(self.dropped(pooled, training=training)))


def _mean(hidden: tf.Tensor, mask: Any) -> tf.Tensor:
    """Computes the mean over unmasked positions, or over all positions if there is no mask."""
    wide = at_least_float32(hidden)
    if mask is None:
        return tf.cast(tf.reduce_mean(wide, 1), hidden.dtype)
    weights = tf.cast(mask, wide.dtype)[:, :, None]
    total = tf.reduce_sum(wide * weights, 1)
    return tf.cast(total / tf.maximum(tf.reduce_sum(weights, 1), 1.0), hidden.dtype)


def _deviation(encoder: T.Bert) -> float:
    return float(getattr(encoder.initializer, "stddev", 0.02))


def make_model(config: ml_collections.ConfigDict, vocabulary: Vocabulary) -> Any:
    """Makes a model from `config`. The encoder's weights are zero until they are read.

    Args:
        config: the whole configuration. Its `model` and `seed` are used.
        vocabulary: the classes, and the encoder's config.

    Returns:
        A `Classifier`, inside a `ParametrizedModel` if its weights are dropped, mixed or have
        noise.

    Raises:
        UserError: more layers are frozen, or reinitialized, than the encoder has, or a pattern
            matches no weight.
    """
    options, row = config.model, layer_seeds(config.seed)
    try:
        encoder = T.Bert.from_config(
            vocabulary.encoder,
            dropout=options.dropout,
            attention_dropout=options.attention_dropout,
            add_pooler=options.pooling == "pooler",
            dtype=options.dtype_policy,
            name="encoder",
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"the config of the pretrained model: {error}") from error
    layers = encoder.stack.layers
    for name in ("freeze_layers", "reinitialize_layers"):
        if options[name] > len(layers):
            raise UserError(
                f"model.{name}={options[name]}: the encoder has {len(layers)} layers; give at most "
                f"{len(layers)}"
            )
    _reseed(encoder, row)
    model = Classifier(
        encoder, len(vocabulary), options.pooling, options.head_dropout, seed=next(row)
    )
    encoder.embeddings.trainable = not options.freeze_embeddings
    for layer in layers[: options.freeze_layers]:
        layer.trainable = False
    draws = next(row)
    chosen = parametrization(options)
    if chosen is None:
        return model
    patterns = {p: chosen for p in options.regularized.split()}
    try:
        return tfwd.parametrize(model, patterns, seed=draws, recompute=options.recompute)
    except ValueError as error:
        raise UserError(f"model.regularized={options.regularized}: {error}") from error


def parametrization(options: ml_collections.ConfigDict) -> P.Parametrization | None:
    """Returns the parametrization of the keys under `model.`, or `None` if all are off.

    Noise is applied first. Dropped weights are therefore exactly 0, and mixed weights exactly equal
    the pretrained weights.
    """
    parts: list[P.Parametrization] = []
    if options.noise:
        parts.append(P.GaussianNoise(options.noise, scale=options.noise_scale))
    shape = (None, 1) if options.whole_inputs else None
    if options.weight_dropout:
        parts.append(P.Dropout(options.weight_dropout, noise_shape=shape))
    if options.mixout:
        parts.append(P.Mixout(options.mixout, noise_shape=shape))
    return P.Chain(parts) if len(parts) > 1 else parts[0] if parts else None


def classifier_of(model: Any) -> Classifier:
    """Returns the `Classifier` inside a model from `make_model`."""
    return model if isinstance(model, Classifier) else model.parametrized.layer


def named_weights(model: Any) -> dict[str, Any]:
    """Returns the variables in order, by names that are the same in Keras 2 and Keras 3."""
    plain = classifier_of(model)
    found = {f"encoder/{target.path}": target.variable for target in targets_of(plain.encoder)}
    for variable in plain.head.weights:
        found[f"head/{_keras.variables.name(variable)}"] = variable
    return found


def reinitialize(model: Any, layers: int, missing: list[str], seed: int) -> None:
    """Draws new values for weights of the encoder. They depend only on the seed.

    Args:
        model: the model, from `make_model`.
        layers: int. The number of last layers to reinitialize. If it is at least 1, the pooler is
            reinitialized too.
        missing: paths of the variables that the folder lacks. They are reinitialized too.
        seed: int. Seed of the draws.
    """
    encoder = classifier_of(model).encoder
    count = len(encoder.stack.layers)
    starts = [f"stack/layer_{number}/" for number in range(count - layers, count)]
    if layers:
        starts.append("pooler/")
    chosen = [
        target
        for target in targets_of(encoder)
        if target.path.startswith(tuple(starts)) or target.path in missing
    ]
    generator, deviation = np.random.default_rng(seed), _deviation(encoder)
    for target in chosen:
        if target.name == "kernel":
            values = generator.normal(size=target.shape)
            while (far := np.abs(values) > 2).any():
                values[far] = generator.normal(size=int(far.sum()))
            target.variable.assign(deviation * values)
        else:
            initialize_variables(encoder, [target.path])


def _reseed(encoder: T.Bert, row: Any) -> None:
    """Replaces Keras's dropout layers with `Dropout`, whose draws resume after a restart."""
    holders = [encoder.embeddings]
    for layer in encoder.stack.layers:
        holders += [layer.attention, layer]
    for holder in holders:
        rate = holder.dropped.rate
        del holder.dropped
        holder.dropped = Dropout(rate, next(row), name="dropout", dtype=encoder.dtype_policy)
