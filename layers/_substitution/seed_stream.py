"""`SeedStream`: a root seed and the number of the next training call.

`SeedStream` is a separate layer without weights inside the layer that draws. So it appears in
`variables` but not in `weights`. Files that a plain layer wrote do not contain it and still load.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd._graph.cached_constants import constant
from tfwd._random import seeds
from tfwd.layers._substitution.weight_patterns import QUANTIZED

_counting = threading.Lock()


def checked_seed(seed: Any) -> int | None:
    """Returns a seed as a Python integer, or None.

    Raises:
        ValueError: If the seed is not an integer from 0 to 2^63 - 1.
    """
    if seed is None:
        return None
    is_integer = isinstance(seed, (int, np.integer)) and not isinstance(seed, bool)
    if not is_integer or not 0 <= seed < 1 << 63:
        raise ValueError(f"seed must be None or an integer from 0 to 2^63 - 1, got {seed!r}")
    return int(seed)


class SeedStream(keras.layers.Layer):
    """A training-call counter that makes the seeds of each call.

    Args:
        seed: int. Root seed. Default None, which draws a seed from Keras's global seed.
        share_across_replicas: bool. Draws the same on all replicas of a `tf.distribute` strategy.
            Default False.
        stream: int. Layers with the same seed and different streams draw differently. Default 0.
            The two directions of a `Bidirectional` layer, which have one config, use two streams.

    Attributes:
        wrapper: Name of the wrapper that contains this layer, or "" in another layer. A wrapper's
            weights have other names in files than the weights of the layer inside.

    Raises:
        ValueError: If the seed is not an integer from 0 to 2^63 - 1.
    """

    def __init__(
        self, seed: int | None = None, share_across_replicas: bool = False, stream: int = 0
    ) -> None:
        super().__init__(name="draws")
        self.share_across_replicas = share_across_replicas
        self.stream = stream
        self.wrapper = ""
        # Keras counts its state among `variables` but not among `weights`.
        self.generator = _keras.checkpointed_state.SeedState(checked_seed(seed))
        # Keras never saves a generator's state. TensorFlow's checkpoints follow attributes.
        _keras.checkpointed_state.checkpoint(self, self.generator)
        self.built = True

    @property
    def state(self) -> keras.Variable:
        """int64 `[root, next call]`."""
        return self.generator.state

    @property
    def calls(self) -> int | tf.Tensor:
        """Number of training calls so far: an int, or a tensor inside a graph."""
        calls = _keras.variables.value(self.state)[1]
        return int(calls) if tf.executing_eagerly() else calls

    def next(self, training: bool | tf.Tensor = True) -> tf.Tensor:
        """Returns the number of this call, and counts the call if it is a training call.

        Args:
            training: bool or boolean scalar tensor. Training flag. Default True.

        Returns:
            int64 `[root, number of this call]`.
        """
        if training is True:
            counted = constant((0, 1), tf.int64)
        else:
            counted = tf.stack([tf.zeros([], tf.int64), tf.cast(training, tf.int64)])
        # Replicas are threads that wait for one another. They count separately.
        alone = tf.executing_eagerly() and not tf.distribute.has_strategy()
        with _counting if alone else contextlib.nullcontext():
            state = _keras.variables.value(self.state)
            _keras.variables.assign(self.state, tf.raw_ops.AddV2(x=state, y=counted))
        return state

    def seeds_from_state(
        self, state: tf.Tensor, positions: Sequence[int], replica: int | None = None
    ) -> list[tf.Tensor]:
        """Returns the seeds of the weights at some positions, each int32 `[2]`.

        Args:
            state: int64 `[2]`, as `next` returns it.
            positions: Indices of weights.
            replica: int. Index of the replica. Default None, for the current replica.
        """
        if not positions:
            return []
        if replica is None:
            replica = 0 if self.share_across_replicas else seeds.replica_id()
        chosen = seeds.seeds(state, replica, positions)
        return [seeds.fold_in(s, self.stream, 0) for s in chosen] if self.stream else chosen

    def seeds_of_call(self, call: int | tf.Tensor, positions: Sequence[int]) -> list[tf.Tensor]:
        """Returns the seeds that training call number `call` uses on replica 0."""
        root = _keras.variables.value(self.state)[0]
        return self.seeds_from_state(
            tf.stack([root, tf.cast(call, tf.int64)]), positions, replica=0
        )

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Rejects quantization inside a wrapper. A model's `quantize` calls it for each layer.

        Raises:
            NotImplementedError: If a wrapper trains the quantized layer. Keras turns it into a
                warning.
        """
        if self.wrapper:
            raise NotImplementedError(
                f"layer '{self.wrapper}' cannot train on the quantized layer inside it: {QUANTIZED}"
            )

    def save_own_variables(self, store: Any) -> None:
        store["state"] = np.asarray(self.state)

    def load_own_variables(self, store: Any) -> None:
        if "state" in store:
            self.state.assign(np.asarray(store["state"]))
        elif self.wrapper:
            raise missing_wrapper_error(self.wrapper)
        # The file of a plain layer has no state. The layer keeps its state.


def missing_wrapper_error(wrapper: str) -> ValueError:
    """Returns the error for a wrapper that is not in a file."""
    return ValueError(
        f"the file does not contain layer '{wrapper}', which is one of tfwd's wrappers. If "
        "the plain model wrote the file, load it with tfwd.unwrap(model).load_weights(file), "
        "which sets the same variables"
    )
