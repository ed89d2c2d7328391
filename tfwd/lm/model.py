"""AWD-LSTM of Merity, Keskar and Socher (2017): LSTMs with dropped recurrent weights.

All regularization is optional. An option that is off adds no layer and no operation. If all rates
are 0, the model is an embedding, plain Keras LSTMs and a softmax. States are inputs and outputs, so
that the caller decides which states to carry from window to window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import ml_collections
import tensorflow as tf

from tfwd import _keras, layers
from tfwd.dtypes import at_least_float32
from tfwd.lm import regularized_layers
from tfwd.lm.config import KEYS
from tfwd.runs.training.layer_seeds import layer_seeds

States = list[list[tf.Tensor]]

# Keys under `model.` for the training step, and keys that are named arguments.
_OF_THE_STEP = ("activation_regularization", "temporal_activation_regularization")
_ARGUMENTS = ("embedding_dim", "hidden_units", "dtype_policy")
OPTIONS = {
    name: row.default if row.off is None else row.off
    for group, _, name, row in ((*key.partition("."), row) for key, row in KEYS.items())
    if group == "model" and name not in (*_OF_THE_STEP, *_ARGUMENTS)
}


class Output(NamedTuple):
    """Result of a call of the model.

    Attributes:
        logits: `[batch, time, vocabulary]`, float32 (float64 with that policy).
        states: `[h, c]` of each LSTM after the last step, `[batch, units]` each.
        raw: the last LSTM's output, `[batch, time, units]`.
        dropped: `raw` after the output's locked dropout, which the softmax reads.
    """

    logits: tf.Tensor
    states: States
    raw: tf.Tensor
    dropped: tf.Tensor


@keras.saving.register_keras_serializable(package="tfwd.lm")
class LanguageModel(keras.Model):
    """Word or character model: embedding, LSTMs and softmax, with their regularisation.

    Args:
        vocabulary_size: int. The number of tokens.
        embedding_dim: int. The embedding's width.
        hidden_units: tuple of int. The width of each LSTM, first to last. With `tie_weights` the
            last width is `embedding_dim`.
        dtype_policy: str. The name of a Keras dtype policy. Logits are in at least float32.
        seed: int. Seed of the initial weights and of all draws. `None` takes it from Keras's global
            seed.
        name: str. The model's name. Every variable's path begins with it.
        **options: the keys under `model.` of `tfwd.lm.config.KEYS`: rates and noise, which are off
            by default, `tie_weights`, `init_scale`, `recompute`. `KEYS` explains them.

    Raises:
        TypeError: there is no such option.
        ValueError: the weights are tied and the last LSTM is not as wide as the embedding, or a
            rate is outside [0, 1).

    References:
        Merity, Keskar and Socher, "Regularizing and Optimizing LSTM Language Models" (2017).
        LSTM weights start uniform in (-1/sqrt(units), 1/sqrt(units)), and the softmax's bias at
        zero, as in the authors' program. Difference: an LSTM of their program adds two bias
        vectors. This model's LSTM has one bias vector with the same initialization, and the forget
        gate gets no extra bias.

    Example:
    >>> model = LanguageModel(10, embedding_dim=4, hidden_units=(6, 4), weight_dropout=0.5)
    >>> output = model(tf.zeros([2, 3], tf.int32), training=True)
    >>> output.logits.shape
    TensorShape([2, 3, 10])
    >>> [[tuple(tensor.shape) for tensor in pair] for pair in output.states]
    [[(2, 6), (2, 6)], [(2, 4), (2, 4)]]
    """

    built: bool  # of keras.Model

    def __init__(
        self,
        vocabulary_size: int,
        embedding_dim: int = 400,
        hidden_units: Sequence[int] = (1150, 1150, 400),
        *,
        dtype_policy: str = "float32",
        seed: int | None = None,
        name: str = "language_model",
        **options: Any,
    ):
        super().__init__(name=name, dtype=dtype_policy)
        hidden_units = tuple(int(units) for units in hidden_units)
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            names = ", ".join(OPTIONS)
            raise TypeError(f"LanguageModel has no option {unknown[0]}; its options are {names}")
        options = {**OPTIONS, **options}
        if not hidden_units:
            raise ValueError("hidden_units is empty: give the width of at least one LSTM")
        if options["tie_weights"] and hidden_units[-1] != embedding_dim:
            raise ValueError(
                f"hidden_units={hidden_units} with tie_weights: the last LSTM must be as wide as "
                f"the embedding, embedding_dim={embedding_dim}"
            )
        self._options: dict[str, Any] = {
            "vocabulary_size": vocabulary_size,
            "embedding_dim": embedding_dim,
            "hidden_units": list(hidden_units),
            **options,
            "seed": seed,
        }
        self.vocabulary_size = vocabulary_size
        self.hidden_units = hidden_units
        seeds = layer_seeds(seed)
        shared = {"dtype": self.dtype_policy}
        self.embedding = regularized_layers.embedding(
            vocabulary_size, embedding_dim, seeds, options, **shared
        )

        def locked(option: str, name: str) -> keras.layers.Layer | None:
            return regularized_layers.locked(options[option], seeds, name=name, **shared)

        # One attribute per layer, and no list of layers: tf.train.Checkpoint follows the attributes
        # of a Keras model. It would silently omit layers in a list.
        self.input_dropout = locked("input_dropout", "input_dropout")
        for number, units in enumerate(hidden_units, 1):
            lstm = regularized_layers.lstm(units, seeds, options, name=f"lstm_{number}", **shared)
            setattr(self, f"lstm_{number}", lstm)
            if number < len(hidden_units):
                name = f"hidden_dropout_{number}"
                setattr(self, name, locked("hidden_dropout", name))
        self.output_dropout = locked("output_dropout", "output_dropout")
        if options["tie_weights"]:
            self.decoder = layers.TiedDense(self.embedding, name="decoder", **shared)
        else:
            self.decoder = keras.layers.Dense(
                vocabulary_size,
                kernel_initializer=regularized_layers.uniform(options["init_scale"], seeds),
                name="decoder",
                **shared,
            )
        # All shapes are known, so the weights are made now. A checkpoint can then be read before
        # the first call.
        _keras.layer_building.build(self, (None, None))

    @property
    def lstms(self) -> list[keras.layers.Layer]:
        """Returns the LSTMs, or the wrappers around them, first to last."""
        return [getattr(self, f"lstm_{n}") for n in range(1, len(self.hidden_units) + 1)]

    def build(self, input_shape: Any = None) -> None:
        """Makes the weights. `input_shape` is ignored, because all shapes are known."""
        if self.built:
            return
        _keras.layer_building.build(self.embedding, (None, None))
        width = self._options["embedding_dim"]
        for layer, units in zip(self.lstms, self.hidden_units, strict=True):
            _keras.layer_building.build(layer, (None, None, width))
            width = units
        _keras.layer_building.build(self.decoder, (None, None, width))
        self.built = True

    def zero_state(self, batch_size: int | tf.Tensor) -> States:
        """Returns the state before the first token: zeros, `[h, c]` of `[batch_size, units]`."""
        dtype = self.compute_dtype
        return [
            [tf.zeros([batch_size, units], dtype) for _ in range(2)] for units in self.hidden_units
        ]

    def call(
        self, ids: tf.Tensor, states: States | None = None, training: bool | None = None
    ) -> Output:
        """Runs the model over a window.

        Args:
            ids: int32 `[batch, time]`. The token ids.
            states: as in `Output.states`; `None` for zeros.
            training: bool. True enables the regularization.

        Returns:
            `Output(logits, states, raw, dropped)`.
        """
        if states is None:
            states = self.zero_state(tf.shape(ids)[0])
        values = self.embedding(ids)  # Keras passes `training` of this call to the layer
        values = _apply_if_present(self.input_dropout, values, training)
        carried = []
        for number, layer in enumerate(self.lstms, 1):
            values, *state = layer(values, initial_state=states[number - 1], training=training)
            carried.append(state)
            if number < len(self.hidden_units):
                values = _apply_if_present(
                    getattr(self, f"hidden_dropout_{number}"), values, training
                )
        raw = values
        dropped = _apply_if_present(self.output_dropout, raw, training)
        return Output(at_least_float32(self.decoder(dropped)), carried, raw, dropped)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**self._options, "dtype_policy": self.dtype_policy.name, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> LanguageModel:
        """Makes a model with new weights from the arguments that `get_config` returned."""
        return cls(**config)


def _apply_if_present(
    layer: keras.layers.Layer | None, values: tf.Tensor, training: Any
) -> tf.Tensor:
    return values if layer is None else layer(values, training=training)


def make_model(config: ml_collections.ConfigDict, vocabulary_size: int) -> LanguageModel:
    """Makes a new model from a configuration.

    Args:
        config: the whole configuration. Its `model` and `seed` are used.
        vocabulary_size: int. The number of tokens.
    """
    options = {n: value for n, value in config.model.items() if n not in _OF_THE_STEP}
    return LanguageModel(vocabulary_size, seed=config.seed, **options)


def named_weights(model: LanguageModel) -> dict[str, Any]:
    """Returns the model's variables in order, by names that are the same in Keras 2 and Keras 3.

    Example:
    >>> list(named_weights(LanguageModel(9, embedding_dim=4, hidden_units=(4,))))
    ... # doctest: +NORMALIZE_WHITESPACE
    ['embedding/embeddings', 'lstm_1/kernel', 'lstm_1/recurrent_kernel', 'lstm_1/bias',
     'decoder/bias']
    """
    parts = {"embedding": model.embedding}
    parts |= {f"lstm_{number}": layer for number, layer in enumerate(model.lstms, 1)}
    parts["decoder"] = model.decoder
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for part, layer in [*parts.items(), ("", model)]:  # last, the additional weights of a subclass
        for variable in layer.weights:
            if id(variable) not in seen:  # a tied softmax shares the embedding's matrix
                seen.add(id(variable))
                found[f"{part}/{_keras.variables.name(variable)}".lstrip("/")] = variable
    return found
