"""Run a function of tensors and seeds so that backward keeps its arguments and nothing else.

Forward computes the result and forgets how. Backward makes the draws again from the same seeds,
runs the function again, and takes the gradient of that. Since a draw is a pure function of its
seed, both runs see the same masks.

Two things would undo the saving in a graph, where the order of operations is the executor's
choice and equal operations are merged. A draw that depends on a seed alone can be made at time
zero, so that the masks of all layers are alive at once: forward's seeds are made to depend on the
function's input. And backward's draw equals forward's, so that an optimizer makes one of the two
and keeps it alive between them: backward's seeds are made to depend on the incoming gradient. In
both cases the dependence is an integer that is added to the seed and is always zero, which no
optimizer can know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfwd import training as training_flag

Tensors = list[tf.Tensor]
Function = Callable[[bool, Tensors, Tensors], Tensors]


def call(
    function: Function, training: bool | tf.Tensor, tensors: Sequence[tf.Tensor], seeds: Tensors
) -> Tensors:
    """Computes `function(training, tensors, seeds)`, keeping only the arguments for backward.

    Args:
        function: a pure function: what it returns depends on its arguments alone, and it changes
            nothing. It must return the same number of tensors of the same dtypes for either flag.
            A tensor that it takes from elsewhere gets no gradient.
        training: the training flag that is passed on; for a tensor, as a Python bool in each
            branch of a `tf.cond`.
        tensors: the arguments with respect to which there are gradients (of floating or complex
            dtype), and others.
        seeds: integer tensors.

    Returns:
        The function's result.

    Example:

    >>> w = tf.ones([4])
    >>> def f(training, tensors, seeds):
    ...     return [tensors[0] * tf.random.stateless_uniform([4], seeds[0])]
    >>> with tf.GradientTape() as tape:
    ...     tape.watch(w)
    ...     (y,) = call(f, True, [w], [tf.constant([1, 2])])
    >>> bool(tf.reduce_all(tape.gradient(y, w) == y))
    True

    References: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016);
    `tf.recompute_grad`, which copies its arguments, merges the draws and lacks the training flag.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    count = len(tensors)

    @tf.custom_gradient
    def checkpoint(*arguments: tf.Tensor) -> Any:
        values, keys = list(arguments[:count]), list(arguments[count:])

        early = _after(keys, values)

        def forward(*_: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return training_flag.cond(
                training,
                lambda: tuple(function(True, values, early)),
                lambda: tuple(function(False, values, early)),
            )

        # In eager mode a tape records, and keeps, all that happens in a custom gradient; inside
        # `tf.recompute_grad` it does not.
        eager = tf.executing_eagerly()
        outputs = tf.recompute_grad(forward)(*arguments) if eager else forward()

        def backward(*upstream: tf.Tensor) -> list:
            late = _after(keys, upstream)
            gradients = training_flag.cond(
                training,
                lambda: _gradients(function, True, values, late, upstream, dense),
                lambda: _gradients(function, False, values, late, upstream, dense),
            )
            given = iter(gradients)
            of_values = [next(given) if _differentiable(value) else None for value in values]
            return [*of_values, *(None for _ in keys)]

        return tuple(outputs), backward

    # The branches of a tf.cond must return tensors; elsewhere None says that there is no gradient.
    dense = not isinstance(training, bool)
    return list(checkpoint(*tensors, *seeds))


def _gradients(
    function: Function,
    training: bool,
    values: Tensors,
    seeds: Tensors,
    upstream: Sequence[tf.Tensor | None],
    dense: bool,
) -> list[tf.Tensor | None]:
    """d(function)/d(values) times upstream, for the values that have a gradient."""
    # One tensor may stand in the list twice; each place has a gradient of its own.
    values = [tf.identity(value) for value in values]
    watched = [value for value in values if _differentiable(value)]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(watched)
        outputs = function(training, values, seeds)
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, upstream, strict=True)
        if _differentiable(output) and gradient is not None
    ]
    gradients = tape.gradient(
        [output for output, _ in pairs],
        watched,
        output_gradients=[gradient for _, gradient in pairs],
        unconnected_gradients="zero" if dense else "none",
    )
    return [tf.convert_to_tensor(gradient) for gradient in gradients] if dense else gradients


def _after(seeds: Tensors, tensors: Sequence[tf.Tensor | None]) -> Tensors:
    """The same seeds, not known before the first numeric one of the tensors is."""
    if tf.executing_eagerly():
        return seeds
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype.is_complex:
            tensor = tf.math.real(tensor)
        if tensor.dtype.is_floating or tensor.dtype.is_integer:
            zero = _opaque_zero(tensor)
            return [seed + tf.cast(zero, seed.dtype) for seed in seeds]
    return seeds


def _differentiable(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _opaque_zero(tensor: tf.Tensor) -> tf.Tensor:
    """An int32 scalar that is always 0 and depends on the tensor's data."""
    first = tf.reshape(tensor, [-1])[:1]
    return tf.cast(tf.reduce_any((first < 0) & (first > 0)), tf.int32)
