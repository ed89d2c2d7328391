"""`SeedStream`: a root seed and the number of the next training call.

It is a layer of its own, without weights, that stands inside the layer which draws: so it appears
in `variables` but not in `weights`, and files that were written by a plain layer, which know
nothing of it, still load.
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
from tfwd._graph.constants import constant
from tfwd._random import seeds
from tfwd.layers._substitution.weight_selection import QUANTIZED

_counting = threading.Lock()


def checked_seed(seed: Any) -> int | None:
    """A seed as a Python integer, or None.

    Raises:
        ValueError: if it is not an integer from 0 to 2^63 - 1.
    """
    if seed is None:
        return None
    whole = isinstance(seed, (int, np.integer)) and not isinstance(seed, bool)
    if not whole or not 0 <= seed < 1 << 63:
        raise ValueError(f"seed must be None or an integer from 0 to 2^63 - 1, got {seed!r}")
    return int(seed)


class SeedStream(keras.layers.Layer):
    """Counts training calls and makes their seeds.

    Args:
        seed: the root seed, an integer, or None for one drawn from Keras's global seed.
        share_across_replicas: draw alike on all replicas of a `tf.distribute` strategy.
        stream: layers of one seed and different streams draw differently, as the two directions of
            a `Bidirectional` layer, which makes them from one config.

    Attributes:
        wrapper: the name of the wrapper that this is a part of; empty in another layer. A wrapper's
            weights have other names in files than those of the layer inside.

    Raises:
        ValueError: if the seed is not an integer from 0 to 2^63 - 1.
    """

    def __init__(
        self, seed: int | None = None, share_across_replicas: bool = False, stream: int = 0
    ) -> None:
        super().__init__(name="draws")
        self.share_across_replicas = share_across_replicas
        self.stream = stream
        self.wrapper = ""
        # Keras counts its state among `variables` but not among `weights`.
        self.generator = _keras.variables.SeedState(checked_seed(seed))
        # Keras saves no generator's state in any format; TensorFlow's checkpoints go by attributes.
        _keras.variables.checkpoint(self, self.generator)
        self.built = True

    @property
    def state(self) -> keras.Variable:
        """int64 `[root, next call]`."""
        return self.generator.state

    @property
    def calls(self) -> int | tf.Tensor:
        """How many training calls there were: an int, or a tensor inside a graph."""
        calls = _keras.variables.value(self.state)[1]
        return int(calls) if tf.executing_eagerly() else calls

    def next(self, training: bool | tf.Tensor = True) -> tf.Tensor:
        """Takes the number of this call, and counts the call if it is a training call.

        Returns:
            int64 `[root, number of this call]`.
        """
        if training is True:
            counted = constant((0, 1), tf.int64)
        else:
            counted = tf.stack([tf.zeros([], tf.int64), tf.cast(training, tf.int64)])
        # Replicas are threads that wait for one another, and count by themselves.
        alone = tf.executing_eagerly() and not tf.distribute.has_strategy()
        with _counting if alone else contextlib.nullcontext():
            state = _keras.variables.value(self.state)
            _keras.variables.assign(self.state, tf.raw_ops.AddV2(x=state, y=counted))
        return state

    def seeds_of(
        self, state: tf.Tensor, positions: Sequence[int], replica: int | None = None
    ) -> list[tf.Tensor]:
        """The seeds of the weights at some positions, each int32 `[2]`.

        Args:
            state: as `next` returns it.
            positions: indices of weights.
            replica: by default this one.
        """
        if not positions:
            return []
        if replica is None:
            replica = 0 if self.share_across_replicas else seeds.replica_id()
        drawn = seeds.seeds(state, replica, max(positions) + 1)
        chosen = [drawn[position] for position in positions]
        return [seeds.fold(s, self.stream, 0) for s in chosen] if self.stream else chosen

    def seed_at(self, call: int | tf.Tensor, position: int) -> tf.Tensor:
        """The seed that training call number `call` uses on replica 0."""
        root = _keras.variables.value(self.state)[0]
        (seed,) = self.seeds_of(tf.stack([root, tf.cast(call, tf.int64)]), [position], replica=0)
        return seed

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Is asked by a model's `quantize`, after the layers beside it. There are no weights here.

        Raises:
            NotImplementedError: if the layer beside it is one that a wrapper trains; Keras makes a
                warning of it.
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
            raise plain_file(self.wrapper)
        # The file of a plain layer in whose place another one stands has no state: it stays.


def plain_file(wrapper: str) -> ValueError:
    """The error of a wrapper that is not in a file."""
    return ValueError(
        f"the file knows nothing of layer '{wrapper}', which is one of tfwd's wrappers: a file "
        "that the plain model wrote is read by tfwd.unwrap(model).load_weights(file), into the "
        "same variables"
    )
