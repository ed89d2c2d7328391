"""What is to happen with each update of a variable, and nothing else.

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

# (the optimizer, its own update_step, gradient, variable, learning rate)
Step = Callable[[Any, Callable[..., None], Any, tf.Variable, Any], None]


def is_overwritten(variable: Any) -> bool:
    """Whether Keras puts the gradient in the variable's place, as it does for float8 scales."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def schedule_step(optimizer: Optimizer) -> tf.Tensor:
    """The number of the step that Keras's own learning rate schedules are called with."""
    return tf.convert_to_tensor(optimizer._iterations.value)


@contextlib.contextmanager
def intercepted(
    optimizers: Sequence[Optimizer],
    step: Step,
    before: Callable[[Optimizer], None],
) -> Iterator[None]:
    """While open, each update of a variable goes through `step`, and each update of all `before`.

    Args:
        optimizers: as `leaves` returns them. Their own decay is left out meanwhile.
        step: called in place of `update_step`, with that as its first argument.
        before: called with the optimizer once an update, before that of any variable.
    """
    # Replicas enter one after the other, and all are in it when the first leaves.
    for leaf in optimizers:
        depth, kept = vars(leaf).get("_tfwd_intercepted", (0, None))
        if not depth:
            own = leaf.update_step
            kept = {n: vars(leaf)[n] for n in ("update_step",) if n in vars(leaf)}

            def update_step(
                gradient: Any, variable: Any, learning_rate: Any, leaf: Any = leaf, own: Any = own
            ) -> None:
                step(leaf, own, gradient, variable, learning_rate)

            def decay(variables: Any, leaf: Any = leaf) -> None:
                before(leaf)

            # Past Keras's tracking of attributes, which has no business with functions.
            object.__setattr__(leaf, "update_step", update_step)
            object.__setattr__(leaf, "_apply_weight_decay", decay)
        object.__setattr__(leaf, "_tfwd_intercepted", (depth + 1, kept))
    try:
        yield
    finally:
        for leaf in optimizers:
            depth, kept = leaf._tfwd_intercepted
            if depth > 1:
                object.__setattr__(leaf, "_tfwd_intercepted", (depth - 1, kept))
                continue
            attributes: dict[str, Any] = leaf.__dict__
            for name in ("update_step", "_apply_weight_decay", "_tfwd_intercepted"):
                del attributes[name]
            attributes.update(kept)


def on_every_replica(variables: Sequence[Any], update: Callable[..., None], *args: Any) -> None:
    """Calls `update(variable, *values)` on every replica's copy of each variable.

    Args:
        variables: Keras variables or `tf.Variable`s.
        update: called with the copy, and with an element of each of `args`.
        args: lists as long as `variables`, of what a replica has its own copy of.
    """

    def merged(strategy: tf.distribute.Strategy, *lists: Any) -> None:
        for variable, *values in zip(*lists, strict=True):
            strategy.extended.update(variable, update, args=tuple(values), group=False)

    plain = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    tf.__internal__.distribute.interim.maybe_merge_call(
        merged, tf.distribute.get_strategy(), plain, *args
    )


def after(optimizer: Any, done: Any) -> contextlib.AbstractContextManager[None]:
    """Where an optimizer makes its step after an operation; TensorFlow keeps the order by itself.

    Args:
        optimizer: the one that makes the step.
        done: the operation, None for none.
    """
    return contextlib.nullcontext()


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
