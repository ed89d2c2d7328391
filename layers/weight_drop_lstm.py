"""`WeightDropLSTM`: `keras.layers.LSTM` with dropout on its recurrent kernel."""

from __future__ import annotations

import functools
from typing import Any

import keras

from tfwd import _keras
from tfwd.layers._substitution import caller_detection, recurrent_call
from tfwd.layers._substitution.seed_stream import checked_seed
from tfwd.layers._substitution.weight_perturbation_mixin import (
    PERTURBATION_ATTRIBUTES,
    WeightPerturbationMixin,
)
from tfwd.parametrizations import Dropout


@keras.saving.register_keras_serializable("tfwd")
class WeightDropLSTM(WeightPerturbationMixin, keras.layers.LSTM):
    """An LSTM with dropout on the entries of its recurrent kernel during training.

    Formula: an LSTM with the recurrent kernel `U' = m U / keep` and `m_ij ~ Bernoulli(keep)`.
    `keep` is `1 - weight_dropout` rounded to a multiple of 2^-16. The whole batch and all time
    steps share one mask. The next training call draws another mask.

    It is a `keras.layers.LSTM`, with the same arguments (by name), weights and order of weights. It
    uses the same fast implementations, because the mask is drawn outside the loop.

    Keras's files name groups of weights by class. So read and write the file of a plain LSTM
    through `tfwd.unwrap`, which returns a plain LSTM on the same variables:
    `tfwd.unwrap(model).load_weights(file)`.

    Unlike `WeightDropout` around an LSTM, it can be inside `keras.layers.Bidirectional`. The two
    directions then draw differently from one seed.

    Args:
        units: int. Dimension of the state and the output.
        weight_dropout: float, schedule or variable. Drop rate in [0, 1) of the recurrent kernel, as
            in `parametrizations.Dropout`. Default 0.5.
        seed: int. Also used by the LSTM's own `dropout` and `recurrent_dropout`. Default None,
            which draws a seed from Keras's global seed.
        recompute: As in `Parametrized`.
        **kwargs: All other arguments of `keras.layers.LSTM`.

    Raises:
        ValueError: If the rate is out of range.

    Example:
        >>> import keras, tensorflow as tf
        >>> from tfwd import layers
        >>> lstm = layers.WeightDropLSTM(4, weight_dropout=0.5, return_sequences=True, seed=1)
        >>> x = tf.ones((2, 3, 5))
        >>> a, b = lstm(x, training=True), lstm(x, training=True)
        >>> [bool(tf.reduce_all(a[:, t] == b[:, t])) for t in range(3)]  # the state starts at zero
        [True, False, False]

    References: Merity et al., "Regularizing and Optimizing LSTM Language Models" (2017).
    """

    def __init__(
        self,
        units: int,
        weight_dropout: Any = 0.5,
        seed: int | None = None,
        recompute: bool = True,
        **kwargs: Any,
    ) -> None:
        seed = checked_seed(seed)
        super().__init__(units, seed=seed, **kwargs)
        dropped = {"recurrent_kernel": Dropout(weight_dropout)}
        self._init_perturbation(dropped, seed, recompute, stream=int(self.go_backwards))

    @property
    def weight_dropout(self) -> Any:
        """The given drop rate of the recurrent kernel."""
        return self.parametrizations["recurrent_kernel"].rate

    def build(self, sequences_shape: Any, *args: Any, **kwargs: Any) -> None:
        super().build(sequences_shape, *args, **kwargs)
        self._targeted()

    def call(
        self,
        sequences: Any,
        initial_state: Any = None,
        mask: Any = None,
        training: Any = False,
    ) -> Any:
        arguments = {"initial_state": initial_state, "mask": mask}
        # If the training flag is a tensor, Keras 3 treats it as a second input and does not pass on
        # the mask.
        arguments["mask"], _ = _keras.recurrent_layers.masks_of_sequences(sequences, arguments)
        run, unperturbed = self._run, super().call
        return self._perturbed_call(run, (sequences,), arguments, training, unperturbed)

    def _unperturbed_call(self, *args: Any, **kwargs: Any) -> Any:
        return keras.layers.LSTM.call(self, *args, **kwargs)

    def _run(self, sequences: Any, training: bool, **arguments: Any) -> Any:
        # Evaluation runs Keras's own code, so its results equal Keras's, bit for bit.
        fast = training or caller_detection.is_sampling()
        run = functools.partial(recurrent_call.call, self) if fast else super().call
        return run(sequences, training=training, **arguments)

    def unwrapped(self) -> keras.layers.LSTM:
        """Returns a plain `keras.layers.LSTM` on the same variables."""
        return _keras.copies.share(self, keras.layers.LSTM, leave_out=PERTURBATION_ATTRIBUTES)

    def get_config(self) -> dict[str, Any]:
        rate = self.parametrizations["recurrent_kernel"].get_config()["rate"]
        config = {**super().get_config(), "seed": self.seed}
        return {**config, "weight_dropout": rate, "recompute": self.recompute}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WeightDropLSTM:
        config = dict(config)
        rate = _keras.copies.deserialize(config.pop("weight_dropout"))
        return cls(weight_dropout=rate, **config)
