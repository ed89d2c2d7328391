"""`ApplyIfFinite`: skips steps whose gradients or learning rate are not finite.

A single batch can have a gradient that is NaN or infinite. An optimizer would write it into all
weights and into its own moments, and could never remove it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._graph import private_graph_apis
from tfwd._graph.tentative_assignments import Tentative, agreed
from tfwd._keras import update_interception, wrapped_optimizers
from tfwd.finite import all_finite


@keras.saving.register_keras_serializable("tfwd")
class ApplyIfFinite(_keras.wrapped_optimizers.OptimizerWrapper):
    """An optimizer wrapper that skips steps with NaN or infinite gradients.

    A step is bad if any element of a gradient is NaN or infinite. It is also bad if the learning
    rate is negative or not finite. A bad step changes nothing: no weight, and no state of the
    optimizer such as moments, the step counter, accumulated gradients or moving averages. If a
    gradient is bad on one replica, all replicas skip the step.

    Every other step equals the wrapped optimizer's step, bit for bit. The last bit may differ if a
    compiler rounds differently. XLA, and oneDNN in graphs, may fuse a bare optimizer's update with
    the computation of the gradients.

    At most `max_consecutive` bad steps in a row are skipped, as in Optax's `apply_if_finite`.
    Further bad steps are made. The next good step resets the count. If the error is permanent, the
    run therefore fails visibly, instead of making no progress. An example is a schedule whose
    learning rate is NaN at one step. A skipped step does not advance the step counter, so the
    schedule never leaves that step.

    A LossScaleOptimizer inside handles gradients that are not finite. It must see them to lower its
    scale, and it skips the step itself. `ApplyIfFinite` then checks only the learning rate. It
    counts only the steps that it skips because of the learning rate.

    A wrapper around `ApplyIfFinite`, such as `DecoupledWeightDecay` or `NonMonotonicASGD`, also
    does nothing in a skipped step. `skipped` and `consecutive` are saved and restored with the
    optimizer.

    Args:
        optimizer: Keras optimizer, or its name.
        max_consecutive: int. Number of bad steps in a row that are skipped, at least 0. Default 5.
        name: str. Name of the optimizer. Default None.

    Raises:
        TypeError: If the optimizer is not a Keras optimizer.
        ValueError: If max_consecutive is not an integer of at least 0.

    `ApplyIfFinite` protects the weights, but not the metrics of `fit`: a bad batch makes the
    epoch's loss NaN. `tfwd.callbacks.FiniteCheck` also keeps bad batches out of metrics.

    Example:
        >>> import keras, tensorflow as tf
        >>> from tfwd.optimizers import ApplyIfFinite
        >>> optimizer = ApplyIfFinite(keras.optimizers.SGD(1.0))
        >>> weight = tf.Variable([4.0, 8.0], name="weight")
        >>> optimizer.apply([tf.constant([1.0, float("nan")])], [weight])
        >>> optimizer.apply([tf.constant([1.0, 2.0])], [weight])
        >>> weight.numpy(), optimizer.skipped, int(optimizer.iterations)
        (array([3., 6.], dtype=float32), 1, 1)

    References:
        DeepMind, Optax, `optax.apply_if_finite`. Departure: Optax does not check the learning rate,
        and its `total_notfinite` also counts the bad steps that were made.
    """

    leaves_out_steps = True

    def __init__(self, optimizer: Any, max_consecutive: int = 5, name: str | None = None) -> None:
        is_integer = isinstance(max_consecutive, int) and not isinstance(max_consecutive, bool)
        if not is_integer or max_consecutive < 0:
            raise ValueError(
                f"{type(self).__name__}: max_consecutive={max_consecutive!r}: expected an "
                "integer of at least 0"
            )
        super().__init__(optimizer, name=name)
        self.max_consecutive = max_consecutive

    def _build(self, variables: list[keras.Variable]) -> None:
        self._skipped = self._add_variable("skipped", "int64", 0)
        self._consecutive = self._add_variable("consecutive", "int64", 0)

    @property
    def skipped(self) -> int:
        """Number of skipped steps."""
        return int(self._skipped.numpy()) if self.built else 0

    @property
    def consecutive(self) -> int:
        """Number of bad steps in a row until now, 0 after a good step."""
        return int(self._consecutive.numpy()) if self.built else 0

    def _apply(self, grads: list[Any], variables: list[Any], make: Callable[[], Any]) -> Any:
        good = agreed(self._is_good(grads))
        consecutive = _keras.variables.value(self._consecutive) + 1
        consecutive = tf.where(good, tf.zeros_like(consecutive), consecutive)
        made = good | (consecutive > self.max_consecutive)
        self._consecutive.assign(consecutive)
        self._skipped.assign_add(tf.cast(~made, tf.int64))
        # Get the log before another replica leaves `detect_update`.
        update_log = update_interception.update_log(self)

        def step() -> tf.Tensor:
            if update_log is None:
                make()
                return tf.constant(True)
            with update_interception.detect_update(self) as was_made:
                make()
                return was_made()

        sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in grads)
        result = _made_if(made, step, wrapped_optimizers.leaves(self.inner), sparse)
        if update_log is not None:
            update_log.append(result)

    def _is_good(self, grads: list[Any]) -> tf.Tensor:
        """Returns True if the step is good on this replica."""
        good = tf.constant(True)
        if not wrapped_optimizers.lowers_scale(self.inner):
            good = all_finite([_as_tensor(gradient) for gradient in grads if gradient is not None])
        for leaf in wrapped_optimizers.leaves(self.inner):
            if wrapped_optimizers.has_learning_rate(leaf):
                rate = tf.cast(wrapped_optimizers.learning_rate(leaf), tf.float64)
                good &= tf.math.is_finite(rate) & (rate >= 0)
        return good

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "max_consecutive": self.max_consecutive}


def _as_tensor(gradient: Any) -> Any:
    return gradient if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)


def _replicas() -> Any:
    """Returns the replica context if there are several replicas, else None."""
    context = tf.distribute.get_replica_context()
    return context if context is not None and context.num_replicas_in_sync > 1 else None


def _made_if(
    when: tf.Tensor, step: Callable[[], tf.Tensor], leaves: list[Any], sparse: bool
) -> tf.Tensor:
    """Makes a step if `when` is True. Returns True if the step was made.

    Args:
        when: Boolean scalar, the same on all replicas.
        step: Function that makes the step and returns True if it was made.
        leaves: Optimizers that make the updates.
        sparse: bool. A gradient is sparse. XLA may not know its number of rows.
    """
    context = _replicas()
    if context is not None and not tf.__internal__.distribute.strategy_supports_no_merge_call():
        # Updates of variables synchronize the replicas. They cannot do that in a branch that each
        # replica runs separately. So one branch contains the steps of all replicas.
        return context.merge_call(_made_together, args=(when, step))
    by_methods = not sparse and all(map(update_interception.assigns_by_methods, leaves))
    if not (by_methods and private_graph_apis.in_xla()):
        return tf.cond(when, step, lambda: tf.constant(False))
    # Under XLA a branch would copy all variables.
    with Tentative() as tentative, update_interception.inlined(leaves):
        tentative.decide(when)
        return step() & when


def _made_together(strategy: tf.distribute.Strategy, when: Any, step: Any) -> tf.Tensor:
    # All replicas have the same value, so the value of the first replica is enough.
    def first(values: Any) -> tf.Tensor:
        return strategy.experimental_local_results(values)[0]

    def make() -> tf.Tensor:
        results = strategy.extended.call_for_each_replica(lambda step: step(), args=(step,))
        return tf.identity(first(results))

    return tf.cond(first(when), make, lambda: tf.constant(False))
