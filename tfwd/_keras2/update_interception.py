"""Intercepts an optimizer's updates of its variables, on Keras 2.15.

Keras has no public hook for this. For each variable, an optimizer calls one of its own methods
after clipping. It calls the method on every replica, and never in a step that a loss scale skips.
This module replaces the method on the instance during a call of `apply`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd._keras2 import wrapped_optimizers
from tfwd._keras_shared.keras_own_code import is_of_keras
from tfwd._keras_shared.method_replacement import swapped
from tfwd._keras_shared.optimizer_holder import OptimizerHolder

# A step takes the optimizer, its own update method, gradient, variable and learning rate.
Step = Callable[[Any, Callable[..., None], Any, tf.Variable, Any], None]


def is_overwritten(variable: Any) -> bool:
    """Returns True if Keras replaces the variable by its gradient. Keras 2 never does."""
    return False


def schedule_step(optimizer: Any) -> tf.Tensor:
    """Returns the step number with which Keras's learning rate schedules are called."""
    return tf.convert_to_tensor(optimizer.iterations)


def intercepted(
    optimizers: Sequence[Any], step: Step, before: Callable[[Any], None]
) -> contextlib.AbstractContextManager[None]:
    """Calls `step` for each update of a variable in the body, and `before` once per step.

    Args:
        optimizers: Optimizers, as `leaves` returns them. Their own decay does not run in the body.
        step: Function that is called in place of the optimizer's own method. Its second argument is
            that method.
        before: Function of an optimizer. It is called once per step, before all variables.
    """
    return swapped(optimizers, lambda leaf: _methods(leaf, step, before))


def rates_scaled(
    optimizers: Sequence[Any], factor: Callable[[tf.Variable], float]
) -> contextlib.AbstractContextManager[None]:
    """Updates each variable in the body with its own multiple of the learning rate.

    A decay that uses the learning rate (`intercepted`) uses the multiple. An update reads the rate
    from a variable. This variable has the multiple during the update.

    Args:
        optimizers: Optimizers, as `leaves` returns them, without legacy optimizers.
        factor: Function from a variable to the factor of its learning rate.
    """

    def methods(leaf: Any) -> dict[str, Callable]:
        own, compiled = leaf.update_step, leaf._update_step_xla

        def scaled(make: Callable[[], Any], variable: Any) -> Any:
            rate = tf.identity(leaf.learning_rate)
            leaf.learning_rate.assign(rate * factor(variable))
            made = make()
            leaf.learning_rate.assign(rate)
            return made

        return {
            "update_step": lambda g, v: scaled(lambda: own(g, v), v),
            "_update_step_xla": lambda g, v, key: scaled(lambda: compiled(g, v, key), v),
        }

    def around(optimizer: Any, _: Any, __: Any, make: Callable[[], Any]) -> Any:
        # Replaced inside the step, so that it encloses other replacements of `update_step`.
        with swapped([optimizer], methods, "rates"):
            return make()

    return entered(optimizers, around)


def rows_summed(
    optimizers: Sequence[Any], summed: Callable[[Any], Any]
) -> contextlib.AbstractContextManager[None]:
    """Sums repeated rows of sparse gradients before they are clipped, in the body.

    Keras 2 sums the rows itself, but only after clipping.

    Args:
        optimizers: Optimizers, as `leaves` returns them.
        summed: Function that sums the parts of each row of a gradient.
    """

    def methods(leaf: Any) -> dict[str, Callable]:
        if not (leaf.clipnorm or leaf.global_clipnorm or leaf.clipvalue):
            return {}
        if wrapped_optimizers.is_legacy(leaf):
            transform = leaf._transform_gradients
            return {
                "_transform_gradients": lambda pairs: transform(
                    [(summed(gradient), variable) for gradient, variable in pairs]
                )
            }
        clip = leaf._clip_gradients
        return {"_clip_gradients": lambda gradients: clip([summed(g) for g in gradients])}

    return swapped(optimizers, methods, "rows")


def _methods(leaf: Any, step: Step, before: Callable[[Any], None]) -> dict[str, Callable]:
    """Returns the replacements for the methods of an optimizer."""
    inside = False  # True while a method of the optimizer runs, because it may call another method

    def update(own: Callable[[Any, Any], Any], gradient: Any, variable: Any) -> Any:
        nonlocal inside
        if inside:
            return own(gradient, variable)
        made = None

        def make(gradient: Any, variable: Any, rate: Any = None) -> None:
            nonlocal inside, made
            inside = True
            try:
                made = own(gradient, variable)
            finally:
                inside = False

        step(leaf, make, gradient, variable, wrapped_optimizers.learning_rate(leaf))
        return made

    methods = _legacy_methods if wrapped_optimizers.is_legacy(leaf) else _new_methods
    return methods(leaf, update, before)


def _new_methods(
    leaf: Any, update: Callable[..., Any], before: Callable[[Any], None]
) -> dict[str, Callable]:
    own, compiled = leaf.update_step, leaf._update_step_xla

    # The optimizer keeps the compiled function. So no tensor of this step may be traced into it.
    def update_compiled(gradient: Any, variable: Any, key: int) -> None:
        update(lambda g, v: compiled(g, v, key), gradient, variable)

    return {
        "update_step": lambda gradient, variable: update(own, gradient, variable),
        "_update_step_xla": update_compiled,
        "_apply_weight_decay": lambda variables: before(leaf),
    }


def _legacy_methods(
    leaf: Any, update: Callable[..., Any], before: Callable[[Any], None]
) -> dict[str, Callable]:
    # Keras inspects the methods' arguments once, and caches the result.
    _ = leaf._dense_apply_args, leaf._sparse_apply_args
    transform = leaf._transform_gradients

    def dense(gradient: Any, variable: Any, **kwargs: Any) -> Any:
        return update(lambda g, v: own_dense(g, v, **kwargs), gradient, variable)

    def sparse(own: Callable) -> Callable:
        def apply(gradient: Any, variable: Any, indices: Any, **kwargs: Any) -> Any:
            return update(
                lambda g, v: own(g.values, v, g.indices, **kwargs),
                tf.IndexedSlices(gradient, indices),
                variable,
            )

        return apply

    def transformed(grads_and_vars: Any) -> Any:
        before(leaf)
        return transform(grads_and_vars)

    own_dense = leaf._resource_apply_dense
    methods: dict[str, Callable] = {
        "_resource_apply_dense": dense,
        "_resource_apply_sparse": sparse(leaf._resource_apply_sparse),
        "_transform_gradients": transformed,
    }
    # Keras's own method sums rows with the same index, and then calls `_resource_apply_sparse`.
    summing = "_resource_apply_sparse_duplicate_indices"
    if getattr(type(leaf), summing) is not getattr(wrapped_optimizers.Legacy, summing):
        methods[summing] = sparse(getattr(leaf, summing))
    return methods


_UPDATE_LOG = "_tfwd_update_log"


def _is_gate(optimizer: Any) -> bool:
    """Returns True if it is a wrapper of tfwd that may skip steps."""
    return isinstance(optimizer, OptimizerHolder) and optimizer.leaves_out_steps


@contextlib.contextmanager
def without_warning_of_unused() -> Iterator[None]:
    """Suppresses Keras's warning about variables without a gradient, which each step would show."""

    def other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Gradients do not exist for variables")

    logger = tf.get_logger()
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def entered(
    optimizers: Sequence[Any],
    around: Callable[[Any, list[Any], list[Any], Callable[[], Any]], Any],
) -> contextlib.AbstractContextManager[None]:
    """Calls `around(optimizer, gradients, variables, make)` for each step in the body."""

    def methods(optimizer: Any) -> dict[str, Callable[..., Any]]:
        own = optimizer.apply_gradients

        def apply(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            grads, variables = (list(part) for part in zip(*pairs, strict=True))
            around(optimizer, grads, variables, lambda: own(pairs, *args, **kwargs))
            return optimizer.iterations

        return {"apply_gradients": apply}

    return swapped(optimizers, methods, "entered")


def waiting_for(optimizer: Any, done: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes an optimizer's step wait for an operation.

    TensorFlow keeps the order by itself. But without a control dependency it also rewrites
    operations, and results differ in their last bits. tensorflow-addons makes legacy optimizers
    wait, so this function makes them wait too.

    Args:
        optimizer: Optimizer that makes the step.
        done: Operation, or None.
    """
    waits = done is not None and wrapped_optimizers.is_legacy(optimizer)
    return tf.control_dependencies([done]) if waits else contextlib.nullcontext()


def assigns_by_methods(leaf: Any) -> bool:
    """Returns True if all updates of an optimizer use the methods of `tf.Variable`.

    Legacy optimizers use operations that write into variables directly.
    """
    return not wrapped_optimizers.is_legacy(leaf) and is_of_keras(type(leaf))


def may_divide_by_zero(leaf: Any) -> bool:
    """Returns True for Nadam of Keras 2, whose first update of a single variable divides by 0.

    The trace of this update contains the first value of a product, which is 1.
    """
    return isinstance(leaf, keras.optimizers.Nadam)


def has_rows(grads: Sequence[Any]) -> bool:
    """Returns False. On Keras 3, an update may fail because a gradient of rows makes NaN."""
    return False


def may_have_rows(model: Any) -> bool:
    """Returns False. On Keras 3, it tells whether `has_rows` may be True in a step of a model."""
    return False


def inlined(optimizers: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Prevents that updates in the body are traced into separate functions.

    On a GPU, Keras compiles each update, and uses the trace of one step in another step.
    """

    def methods(leaf: Any) -> dict[str, Callable[..., Any]]:
        return {
            "_update_step_xla": lambda gradient, variable, key: leaf._update_step(
                gradient, variable
            )
        }

    return swapped(optimizers, methods, "inlined")


def update_log(gate: Any) -> list[Any] | None:
    """Returns the list in which a wrapper that may skip steps logs whether it made the step.

    The list exists only in the body of `detect_update`. Elsewhere the result is None.
    """
    return vars(gate).get(_UPDATE_LOG)


@contextlib.contextmanager
def detect_update(optimizer: Any) -> Iterator[Callable[[], Any]]:
    """Detects whether a step of an optimizer made an update.

    A loss scale inside may skip the update, and a wrapper may skip it too.

    Yields:
        A function that returns a boolean tensor. Call it after the step.
    """
    gates = [held for held in wrapped_optimizers.chain(optimizer.inner) if _is_gate(held)]
    if gates:
        # The outer gate also knows the updates inside it. The replicas share one list.
        log = vars(gates[0]).setdefault(_UPDATE_LOG, [])
        try:
            yield lambda: log[-1]
        finally:
            vars(gates[0]).pop(_UPDATE_LOG, None)
        return
    # Keras 2 also counts skipped steps as iterations, so the loss scale must be observed.
    scales = [
        s
        for s in wrapped_optimizers.chain(optimizer.inner)
        if isinstance(s, wrapped_optimizers.LossScaleOptimizer)
    ]
    if not scales or not scales[0].dynamic:
        yield lambda: tf.constant(True)
        return
    state, made = scales[0]._loss_scale, []
    own = state.update

    def update(gradients: Any) -> Any:
        result = own(gradients)
        made.append(result[1])
        return result

    object.__setattr__(state, "update", update)
    try:
        yield lambda: made[-1]
    finally:
        vars(state).pop("update", None)  # another replica may have removed it
