"""Intercepts an optimizer's updates of its variables, on Keras 2.15.

Keras has no public place for it. An optimizer makes an update by calling a method of its own for
each variable: after clipping, never in a step that a loss scale skips, and on every replica. That
method is replaced here on the instance for as long as a call of `apply` lasts.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfwd._keras2 import wrapped_optimizers
from tfwd._keras_shared.holding import Holder
from tfwd._keras_shared.patching import swapped

# (the optimizer, its own update, gradient, variable, learning rate)
Step = Callable[[Any, Callable[..., None], Any, tf.Variable, Any], None]


def is_overwritten(variable: Any) -> bool:
    """Whether Keras puts the gradient in the variable's place; Keras 2 never does."""
    return False


def schedule_step(optimizer: Any) -> tf.Tensor:
    """The number of the step that Keras's own learning rate schedules are called with."""
    return tf.convert_to_tensor(optimizer.iterations)


def intercepted(
    optimizers: Sequence[Any], step: Step, before: Callable[[Any], None]
) -> contextlib.AbstractContextManager[None]:
    """While open, each update of a variable goes through `step`, and each update of all `before`.

    Args:
        optimizers: as `leaves` returns them. Their own decay is left out meanwhile.
        step: called in place of the optimizer's own method, with that as its second argument.
        before: called with the optimizer once an update, before that of any variable.
    """
    return swapped(optimizers, lambda leaf: _methods(leaf, step, before))


def rates_scaled(
    optimizers: Sequence[Any], factor: Callable[[tf.Variable], float]
) -> contextlib.AbstractContextManager[None]:
    """While open, each variable is updated with its own multiple of the learning rate.

    A decay that goes by the learning rate (`intercepted`) goes by that one. An update reads the
    rate from a variable, which has the multiple meanwhile.

    Args:
        optimizers: as `leaves` returns them; none is a legacy one.
        factor: the multiple of a variable.
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
        # Within the step, so that it stands around what others have put around updates.
        with swapped([optimizer], methods, "rates"):
            return make()

    return entered(optimizers, around)


def rows_summed(
    optimizers: Sequence[Any], summed: Callable[[Any], Any]
) -> contextlib.AbstractContextManager[None]:
    """While open, sparse gradients have each row once when they are clipped.

    Keras 2 sums them itself, but afterwards.

    Args:
        optimizers: as `leaves` returns them.
        summed: adds up what a gradient has for the same row.
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
    """What stands in for the methods of an optimizer meanwhile."""
    inside = False  # one of its methods, which may call another

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

    # The compiled function is kept by the optimizer: nothing of the step may be traced into it.
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
    # Keras looks at the methods' arguments once, and keeps what it saw.
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
    # Keras's sums what has the same index, and goes on with the one before.
    summing = "_resource_apply_sparse_duplicate_indices"
    if getattr(type(leaf), summing) is not getattr(wrapped_optimizers.Legacy, summing):
        methods[summing] = sparse(getattr(leaf, summing))
    return methods


_TOLD = "_tfwd_told"


def _is_gate(optimizer: Any) -> bool:
    """Whether it is a wrapper of tfwd's that may leave out steps."""
    return isinstance(optimizer, Holder) and optimizer.leaves_out_steps


@contextlib.contextmanager
def without_warning_of_unused() -> Iterator[None]:
    """Keeps Keras from warning, in every step, of the variables that have no gradient."""

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
    """While open, `around(optimizer, gradients, variables, make)` is called for each step."""

    def methods(optimizer: Any) -> dict[str, Callable[..., Any]]:
        own = optimizer.apply_gradients

        def apply(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            grads, variables = (list(part) for part in zip(*pairs, strict=True))
            around(optimizer, grads, variables, lambda: own(pairs, *args, **kwargs))
            return optimizer.iterations

        return {"apply_gradients": apply}

    return swapped(optimizers, methods, "entered")


def after(optimizer: Any, done: Any) -> contextlib.AbstractContextManager[Any]:
    """Where an optimizer makes its step after an operation.

    TensorFlow keeps the order by itself. But it also rewrites what waits for nothing, to a result
    that is not the same to the last bit, and tensorflow-addons has legacy optimizers wait.

    Args:
        optimizer: the one that makes the step.
        done: the operation, None for none.
    """
    waits = done is not None and wrapped_optimizers.is_legacy(optimizer)
    return tf.control_dependencies([done]) if waits else contextlib.nullcontext()


def assigns_by_methods(leaf: Any) -> bool:
    """Whether all updates of an optimizer go through the methods of `tf.Variable`.

    Legacy optimizers update by operations that write into variables themselves.
    """
    return not wrapped_optimizers.is_legacy(leaf) and type(leaf).__module__.startswith("keras.")


def inlined(optimizers: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """While open, updates are traced into no function that is kept.

    Keras compiles them one by one on a GPU, and uses what it traced for one step in another.
    """

    def methods(leaf: Any) -> dict[str, Callable[..., Any]]:
        return {
            "_update_step_xla": lambda gradient, variable, key: leaf._update_step(
                gradient, variable
            )
        }

    return swapped(optimizers, methods, "inlined")


def told(gate: Any) -> list[Any] | None:
    """Where a wrapper that may leave out steps says whether one was made; None if nobody asks."""
    return vars(gate).get(_TOLD)


@contextlib.contextmanager
def noticed(optimizer: Any) -> Iterator[Callable[[], Any]]:
    """Tells whether a step of an optimizer made an update.

    A loss scale in it may skip it, and so may a wrapper.

    Yields:
        A function that returns a boolean tensor, to be called after the step.
    """
    gates = [held for held in wrapped_optimizers.chain(optimizer.inner) if _is_gate(held)]
    if gates:
        # It also knows what happens inside it. Replicas have one list together.
        heard = vars(gates[0]).setdefault(_TOLD, [])
        try:
            yield lambda: heard[-1]
        finally:
            vars(gates[0]).pop(_TOLD, None)
        return
    # (Keras 2 counts skipped steps too.)
    scales = [
        s
        for s in wrapped_optimizers.chain(optimizer.inner)
        if isinstance(s, wrapped_optimizers.LossScaleOptimizer)
    ]
    if not scales or not scales[0].dynamic:
        yield lambda: tf.constant(True)
        return
    state, told = scales[0]._loss_scale, []
    own = state.update

    def update(gradients: Any) -> Any:
        result = own(gradients)
        told.append(result[1])
        return result

    object.__setattr__(state, "update", update)
    try:
        yield lambda: told[-1]
    finally:
        vars(state).pop("update", None)  # another replica may have left before
