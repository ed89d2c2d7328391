"""`ApplyIfFinite`: leaves out the steps whose gradients or learning rate are not finite.

A single batch can have a gradient that is NaN or infinite. An optimizer would write it into all
weights and into its own moments, from where it never goes away again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._graph import graphs
from tfwd._graph.tentative import Tentative, agreed
from tfwd._keras import updates as _keras_updates
from tfwd._keras import wrapped_optimizers
from tfwd.finite import all_finite


@keras.saving.register_keras_serializable("tfwd")
class ApplyIfFinite(_keras.optimizer_wrapper.OptimizerWrapper):
    """Any Keras optimizer, which makes a step only if gradients and learning rate are finite.

    A step is bad if an element of any gradient is NaN or infinite, or if the learning rate is not
    finite, or negative. A bad step changes nothing: no weight, and nothing that the optimizer
    keeps, be it moments, the step counter, accumulated gradients or moving averages. On several
    replicas, a bad gradient on any of them has all leave the step out. Every other step is that of
    the wrapped optimizer, bit for bit, as far as a compiler does not round otherwise: XLA, and
    oneDNN in graphs, may fuse a bare optimizer's update with the computation of the gradients,
    whose last bit is then another one.

    After more than `max_consecutive` bad steps in a row the step is made all the same, as Optax's
    `apply_if_finite` does: what goes wrong every time does not go away by itself, and the run then
    fails visibly instead of standing still. Bad steps are made from there on, until a step is
    good, which begins a new count. A learning rate that is NaN at one step of a schedule is such a
    case: the step counter stands still, so the schedule never gets past it.

    Around a LossScaleOptimizer, gradients that are not finite are left to that one: it must see
    them to lower its scale, and leaves the step out itself. Only the learning rate is checked then,
    and only the steps left out for it are counted.

    What a wrapper of it does, as `DecoupledWeightDecay` or `NonMonotonicASGD`, is left out with the
    step. `skipped` and `consecutive` are state of the optimizer, saved and restored with it.

    Args:
        optimizer: a Keras optimizer or the name of one.
        max_consecutive: how many bad steps in a row are left out, at least 0.
        name: the optimizer's name.

    Raises:
        TypeError: the optimizer is not a Keras optimizer.
        ValueError: max_consecutive is not a whole number of at least 0.

    Example:

    >>> import keras
    >>> optimizer = ApplyIfFinite(keras.optimizers.SGD(1.0))
    >>> weight = tf.Variable([4.0, 8.0], name="weight")
    >>> optimizer.apply([tf.constant([1.0, float("nan")])], [weight])
    >>> optimizer.apply([tf.constant([1.0, 2.0])], [weight])
    >>> weight.numpy(), optimizer.skipped, int(optimizer.iterations)
    (array([3., 6.], dtype=float32), 1, 1)

    Metrics of `fit` are Keras's own: a bad batch makes the epoch's loss NaN, though the weights are
    safe. `tfwd.callbacks.FiniteCheck` keeps it out of them too.

    References:
        DeepMind, Optax, `optax.apply_if_finite`. Departure: it does not look at the learning rate,
        and its `total_notfinite` also counts the bad steps that were made.
    """

    leaves_out_steps = True

    def __init__(self, optimizer: Any, max_consecutive: int = 5, name: str | None = None) -> None:
        whole = isinstance(max_consecutive, int) and not isinstance(max_consecutive, bool)
        if not whole or max_consecutive < 0:
            raise ValueError(
                f"{type(self).__name__}: max_consecutive={max_consecutive!r}: give a whole number, "
                "at least 0"
            )
        super().__init__(optimizer, name=name)
        self.max_consecutive = max_consecutive

    def _build(self, variables: list[keras.Variable]) -> None:
        self._skipped = self._add_variable("skipped", "int64", 0)
        self._consecutive = self._add_variable("consecutive", "int64", 0)

    @property
    def skipped(self) -> int:
        """How many steps were left out, in all."""
        return int(self._skipped.numpy()) if self.built else 0

    @property
    def consecutive(self) -> int:
        """How many steps in a row were bad until now; 0 after a good one."""
        return int(self._consecutive.numpy()) if self.built else 0

    def _apply(self, grads: list[Any], variables: list[Any], make: Callable[[], Any]) -> Any:
        good = agreed(self._is_good(grads))
        consecutive = _keras.variables.value(self._consecutive) + 1
        consecutive = tf.where(good, tf.zeros_like(consecutive), consecutive)
        made = good | (consecutive > self.max_consecutive)
        self._consecutive.assign(consecutive)
        self._skipped.assign_add(tf.cast(~made, tf.int64))
        told = _keras_updates.told(self)  # before another replica may have left

        def step() -> tf.Tensor:
            if told is None:
                make()
                return tf.constant(True)
            with _keras_updates.noticed(self) as was_made:
                make()
                return was_made()

        sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in grads)
        result = _made_if(made, step, wrapped_optimizers.leaves(self.inner), sparse)
        if told is not None:
            told.append(result)

    def _is_good(self, grads: list[Any]) -> tf.Tensor:
        """Whether the step is good as far as this replica can tell."""
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
    """The context of one replica of several, None elsewhere."""
    context = tf.distribute.get_replica_context()
    return context if context is not None and context.num_replicas_in_sync > 1 else None


def _made_if(
    when: tf.Tensor, step: Callable[[], tf.Tensor], leaves: list[Any], sparse: bool
) -> tf.Tensor:
    """Makes a step if `when`; whether it was made, and `step` returned that it was.

    Args:
        when: the same on all replicas.
        step: makes it.
        leaves: the optimizers that make the updates.
        sparse: whether a gradient is of rows, whose number XLA may not know.
    """
    context = _replicas()
    if context is not None and not tf.__internal__.distribute.strategy_supports_no_merge_call():
        # Updates of variables bring the replicas together, which they cannot do in a branch that
        # each has for itself. So all go into one branch.
        return context.merge_call(_made_together, args=(when, step))
    by_methods = not sparse and all(map(_keras_updates.assigns_by_methods, leaves))
    if not (by_methods and graphs.in_xla()):
        return tf.cond(when, step, lambda: tf.constant(False))
    # Under XLA a branch would copy all variables.
    with Tentative() as tentative, _keras_updates.inlined(leaves):
        tentative.decide(when)
        return step() & when


def _made_together(strategy: tf.distribute.Strategy, when: Any, step: Any) -> tf.Tensor:
    # The same on each replica: what is told of one is told of all.
    def first(values: Any) -> tf.Tensor:
        return strategy.experimental_local_results(values)[0]

    def make() -> tf.Tensor:
        results = strategy.extended.call_for_each_replica(lambda step: step(), args=(step,))
        return tf.identity(first(results))

    return tf.cond(first(when), make, lambda: tf.constant(False))
