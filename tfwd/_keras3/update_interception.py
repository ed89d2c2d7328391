"""Intercepts an optimizer's updates of its variables, on Keras 3.

Keras has no public hook for this. For each variable, an optimizer calls its method `update_step`
after clipping. It calls the method once for several accumulated gradients, on every replica, and
never in a step that a loss scale skips. This module replaces the method on the instance during a
call of `apply`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfwd._keras3.layers import all_layers
from tfwd._keras_shared.keras_own_code import is_of_keras
from tfwd._keras_shared.method_replacement import swapped

# A step takes the optimizer, its own update_step, gradient, variable and learning rate.
Step = Callable[[Any, Callable[..., None], Any, tf.Variable, Any], None]


def is_overwritten(variable: Any) -> bool:
    """Returns True if Keras replaces the variable by its gradient, as for float8 scales."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def schedule_step(optimizer: Optimizer) -> tf.Tensor:
    """Returns the step number with which Keras's learning rate schedules are called."""
    return tf.convert_to_tensor(optimizer._iterations.value)


def intercepted(
    optimizers: Sequence[Optimizer], step: Step, before: Callable[[Optimizer], None]
) -> contextlib.AbstractContextManager[None]:
    """Calls `step` for each update of a variable in the body, and `before` once per step.

    Args:
        optimizers: Optimizers, as `leaves` returns them. Their own decay does not run in the body.
        step: Function that is called in place of `update_step`. Its second argument is
            `update_step`.
        before: Function of an optimizer. It is called once per step, before all variables.
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
    """Updates each variable in the body with its own multiple of the learning rate.

    A decay that uses the learning rate (`intercepted`) uses the multiple.

    Args:
        optimizers: Optimizers, as `leaves` returns them.
        factor: Function from a variable to the factor of its learning rate.
    """

    def methods(leaf: Optimizer) -> dict[str, Callable[..., Any]]:
        own = leaf.update_step

        def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
            own(gradient, variable, learning_rate * factor(variable))

        return {"update_step": update_step}

    def around(optimizer: Any, _: Any, __: Any, make: Callable[[], Any]) -> Any:
        # Replaced inside the step, so that it encloses other replacements of `update_step`.
        with swapped([optimizer], methods, "rates"):
            return make()

    return entered(optimizers, around)


def rows_summed(
    optimizers: Sequence[Optimizer], summed: Callable[[Any], Any]
) -> contextlib.AbstractContextManager[None]:
    """Sums repeated rows of sparse gradients for clipping and for each update in the body.

    Args:
        optimizers: Optimizers, as `leaves` returns them.
        summed: Function that sums the parts of each row of a gradient.
    """

    def methods(leaf: Optimizer) -> dict[str, Callable[..., Any]]:
        own_clip, own_step = leaf._clip_gradients, leaf.update_step
        known: list[Any] = []  # rows of gradients that were summed for clipping

        def clip(gradients: Sequence[Any]) -> Any:
            gradients = [summed(gradient) for gradient in gradients]
            known.extend(g.indices for g in gradients if isinstance(g, tf.IndexedSlices))
            return own_clip(gradients)

        def step(gradient: Any, variable: Any, learning_rate: Any) -> None:
            # Gradients of several replicas are concatenated after they are clipped.
            rows = getattr(gradient, "indices", None)
            if not any(rows is other for other in known):
                gradient = summed(gradient)
            own_step(gradient, variable, learning_rate)

        others: dict[str, Callable[..., Any]] = {}
        if leaf.clipnorm or leaf.global_clipnorm or leaf.clipvalue:
            others["_clip_gradients"] = clip
        if type(leaf) is not keras.optimizers.SGD:  # SGD is linear in the gradient
            others["update_step"] = step
        return others

    return swapped(optimizers, methods, "rows")


def entered(
    optimizers: Sequence[Any],
    around: Callable[[Any, list[Any], list[Any], Callable[[], Any]], Any],
) -> contextlib.AbstractContextManager[None]:
    """Calls `around(optimizer, gradients, variables, make)` for each step in the body."""

    def methods(optimizer: Any) -> dict[str, Callable[..., Any]]:
        own = optimizer.apply

        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            variables = list(trainable_variables or optimizer._trainable_variables)
            return around(optimizer, grads, variables, lambda: own(grads, trainable_variables))

        return {"apply": apply}

    return swapped(optimizers, methods, "entered")


def waiting_for(optimizer: Any, done: Any) -> contextlib.AbstractContextManager[None]:
    """Does nothing. On Keras 2 it makes an optimizer's step wait for an operation.

    On Keras 3, TensorFlow keeps the order by itself.

    Args:
        optimizer: Optimizer that makes the step.
        done: Operation, or None.
    """
    return contextlib.nullcontext()


def assigns_by_methods(leaf: Optimizer) -> bool:
    """Returns True if all updates of an optimizer use the methods of `tf.Variable`."""
    return is_of_keras(type(leaf))


def may_divide_by_zero(leaf: Optimizer) -> bool:
    """Returns False. On Keras 2, it returns True for Nadam."""
    return False


def has_rows(grads: Sequence[Any]) -> bool:
    """Returns True if an update may fail because a gradient of rows makes NaN.

    Keras divides a gradient of rows by a dense tensor. The division fails if a divisor is NaN.
    """
    return any(isinstance(gradient, tf.IndexedSlices) for gradient in grads)


def may_have_rows(model: keras.Model) -> bool:
    """Returns False if no layer of a model can give a weight a gradient of rows.

    Of Keras's layers only `Embedding` does this. The code of other layers is not known.
    """
    return any(
        isinstance(layer, keras.layers.Embedding) or not is_of_keras(type(layer), "call")
        for layer in all_layers(model)
    )


def inlined(optimizers: Sequence[Optimizer]) -> contextlib.AbstractContextManager[None]:
    """Does nothing. On Keras 3, updates are never traced into separate functions."""
    return contextlib.nullcontext()


def update_log(gate: Any) -> list[Any] | None:
    """Returns None. On Keras 2 it returns a list in which a wrapper logs which steps it skips.

    Keras 3 needs no list, because skipped steps do not count as iterations.
    """
    return None


@contextlib.contextmanager
def detect_update(optimizer: Any) -> Iterator[Callable[[], Any]]:
    """Detects whether a step of an optimizer made an update.

    A loss scale may skip the update, and gradients may be accumulated.

    Yields:
        A function that returns a boolean tensor. Call it after the step.
    """
    before = keras.ops.convert_to_tensor(optimizer.iterations) + 0
    yield lambda: keras.ops.convert_to_tensor(optimizer.iterations) > before


@contextlib.contextmanager
def without_warning_of_unused() -> Iterator[None]:
    """Suppresses Keras's warning about variables without a gradient, which each step would show."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist for variables")
        yield
