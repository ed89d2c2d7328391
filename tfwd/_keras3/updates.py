"""Intercepts an optimizer's updates of its variables, on Keras 3.

Keras has no public place for it. An optimizer makes an update by calling its own `update_step` for
each variable: after clipping, once for several accumulated gradients, never in a step that a loss
scale skips, and on every replica. That method is replaced here on the instance for as long as a
call of `apply` lasts.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfwd._keras_shared.patching import swapped

# (the optimizer, its own update_step, gradient, variable, learning rate)
Step = Callable[[Any, Callable[..., None], Any, tf.Variable, Any], None]


def is_overwritten(variable: Any) -> bool:
    """Whether Keras puts the gradient in the variable's place, as it does for float8 scales."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def schedule_step(optimizer: Optimizer) -> tf.Tensor:
    """The number of the step that Keras's own learning rate schedules are called with."""
    return tf.convert_to_tensor(optimizer._iterations.value)


def intercepted(
    optimizers: Sequence[Optimizer], step: Step, before: Callable[[Optimizer], None]
) -> contextlib.AbstractContextManager[None]:
    """While open, each update of a variable goes through `step`, and each update of all `before`.

    Args:
        optimizers: as `leaves` returns them. Their own decay is left out meanwhile.
        step: called in place of `update_step`, with that as its second argument.
        before: called with the optimizer once an update, before that of any variable.
    """

    def methods(leaf: Optimizer) -> dict[str, Callable[..., Any]]:
        own = leaf.update_step

        def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
            step(leaf, own, gradient, variable, learning_rate)

        return {"update_step": update_step, "_apply_weight_decay": lambda variables: before(leaf)}

    return swapped(optimizers, methods)


def rates_scaled(
    optimizers: Sequence[Optimizer], factor: Callable[[tf.Variable], float]
) -> contextlib.AbstractContextManager[None]:
    """While open, each variable is updated with its own multiple of the learning rate.

    A decay that goes by the learning rate (`intercepted`) goes by that one.

    Args:
        optimizers: as `leaves` returns them.
        factor: the multiple of a variable.
    """

    def methods(leaf: Optimizer) -> dict[str, Callable[..., Any]]:
        own = leaf.update_step

        def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
            own(gradient, variable, learning_rate * factor(variable))

        return {"update_step": update_step}

    def around(optimizer: Any, _: Any, __: Any, make: Callable[[], Any]) -> Any:
        # Within the step, so that it stands around what others have put around updates.
        with swapped([optimizer], methods, "rates"):
            return make()

    return entered(optimizers, around)


def rows_summed(
    optimizers: Sequence[Optimizer], summed: Callable[[Any], Any]
) -> contextlib.AbstractContextManager[None]:
    """While open, sparse gradients have each row once, for clipping and for each update.

    Args:
        optimizers: as `leaves` returns them.
        summed: adds up what a gradient has for the same row.
    """

    def methods(leaf: Optimizer) -> dict[str, Callable[..., Any]]:
        own_clip, own_step = leaf._clip_gradients, leaf.update_step
        known: list[Any] = []  # the rows of gradients that were summed to be clipped

        def clip(gradients: Sequence[Any]) -> Any:
            gradients = [summed(gradient) for gradient in gradients]
            known.extend(g.indices for g in gradients if isinstance(g, tf.IndexedSlices))
            return own_clip(gradients)

        def step(gradient: Any, variable: Any, learning_rate: Any) -> None:
            # Gradients of several replicas are put together after they are clipped.
            rows = getattr(gradient, "indices", None)
            if not any(rows is those for those in known):
                gradient = summed(gradient)
            own_step(gradient, variable, learning_rate)

        others: dict[str, Callable[..., Any]] = {}
        if leaf.clipnorm or leaf.global_clipnorm or leaf.clipvalue:
            others["_clip_gradients"] = clip
        if type(leaf) is not keras.optimizers.SGD:  # which is linear in the gradient
            others["update_step"] = step
        return others

    return swapped(optimizers, methods, "rows")


def entered(
    optimizers: Sequence[Any],
    around: Callable[[Any, list[Any], list[Any], Callable[[], Any]], Any],
) -> contextlib.AbstractContextManager[None]:
    """While open, `around(optimizer, gradients, variables, make)` is called for each step."""

    def methods(optimizer: Any) -> dict[str, Callable[..., Any]]:
        own = optimizer.apply

        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            variables = list(trainable_variables or optimizer._trainable_variables)
            return around(optimizer, grads, variables, lambda: own(grads, trainable_variables))

        return {"apply": apply}

    return swapped(optimizers, methods, "entered")


def after(optimizer: Any, done: Any) -> contextlib.AbstractContextManager[None]:
    """Where an optimizer makes its step after an operation; TensorFlow keeps the order by itself.

    Args:
        optimizer: the one that makes the step.
        done: the operation, None for none.
    """
    return contextlib.nullcontext()


def assigns_by_methods(leaf: Optimizer) -> bool:
    """Whether all updates of an optimizer go through the methods of `tf.Variable`."""
    return type(leaf).__module__.startswith("keras.")


def inlined(optimizers: Sequence[Optimizer]) -> contextlib.AbstractContextManager[None]:
    """While open, updates are traced into no function that is kept; on Keras 3 they never are."""
    return contextlib.nullcontext()


def told(gate: Any) -> list[Any] | None:
    """Where a wrapper that may leave out steps says whether one was made; see Keras 2's version.

    On Keras 3 nobody asks: what is left out is not counted.
    """
    return None


@contextlib.contextmanager
def noticed(optimizer: Any) -> Iterator[Callable[[], Any]]:
    """Tells whether a step of an optimizer made an update.

    A loss scale in it may skip it, and gradients may be accumulated.

    Yields:
        A function that returns a boolean tensor, to be called after the step.
    """
    before = keras.ops.convert_to_tensor(optimizer.iterations) + 0
    yield lambda: keras.ops.convert_to_tensor(optimizer.iterations) > before


@contextlib.contextmanager
def without_warning_of_unused() -> Iterator[None]:
    """Keeps Keras from warning, in every step, of the variables that have no gradient."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist for variables")
        yield
