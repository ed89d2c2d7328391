"""Runs a function on effective weights, and recomputes the weights in backward.

`call` computes `weights = draw(tensors, seeds)` and `outputs = function(tensors, weights)`. The
tensors that the function's gradient needs are stored as usual, with one exception. A tensor that
was computed from the effective weights alone is computed again, from the raw weights and the seeds.
A draw is a pure function of its seed, so both draws are the same. This works for every function.
There are two implementations.

*In a graph* the gradient of the function is built as usual, but in a separate graph. That graph
detects when an effective weight would be stored, or a tensor computed only from it (a transpose, a
cast). It uses a new draw instead (`tfwd._graph.saved_tensors`). The function runs once.

*In eager mode, or under a training flag that is a tensor*, stored tensors cannot be replaced. Only
the function's arguments are stored. Backward runs the function a second time from its arguments.

In a graph, the executor chooses the order of operations, and equal operations are merged. Both
could increase the memory again:

- A draw depends only on a seed, so it could run at the start. Then the draws of all layers would be
  alive at the same time. So forward's seeds depend on the function's input. A function may be a
  whole model, so each seed also waits for the tensors with which its weight is first used.
- Backward's draw equals forward's draw. A graph optimizer would merge the two draws and keep the
  result alive. So backward's seeds depend on the data of the incoming gradient. A graph optimizer
  cannot remove this dependency (`delayed_seeds.seeds_after`).
- Backward could draw while it still computes the product for the weight's gradient. It could also
  continue to the next layer before the raw weight's gradient is finished. Then the buffers of two
  layers would be alive at the same time. So the draw waits for the product, and the gradient of the
  inputs waits for the gradient of the raw weights.

`docs/recompute.md` shows which tensors are alive at which time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfwd import training_flag
from tfwd._graph import delayed_seeds, private_graph_apis, saved_tensors
from tfwd._graph.custom_gradient import custom_gradient

Tensors = list[tf.Tensor]
Draw = Callable[[bool, Tensors, Tensors], Tensors]
Function = Callable[[bool, Tensors, Tensors, Tensors], Tensors]


def call(
    draw: Draw,
    function: Function,
    training: bool | tf.Tensor,
    tensors: Sequence[tf.Tensor],
    seeds: Tensors,
) -> Tensors:
    """Computes `function(training, tensors, seeds, draw(training, tensors, seeds))`.

    Args:
        draw: Pure function that returns the effective weights.
        function: Pure function of its arguments. It must return the same number of tensors with the
            same dtypes for both flags. If the function runs again, outer tensors that it uses get
            no gradient.
        training: Training flag for `draw` and `function`. If it is a tensor, each branch of a
            `tf.cond` passes a Python bool.
        tensors: Arguments. Tensors of floating or complex dtype get gradients.
        seeds: Integer tensors, one per effective weight.

    Returns:
        The function's result.

    Example:
        >>> w, x = tf.ones([4]), tf.constant([1.0, 2.0, 3.0, 4.0])
        >>> def draw(training, tensors, seeds):
        ...     return [tensors[0] * tf.random.stateless_uniform([4], seeds[0])]
        >>> def product(training, tensors, seeds, weights):
        ...     return [weights[0] * tensors[1]]
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(w)
        ...     (y,) = call(draw, product, True, [w, x], [tf.constant([1, 2])])
        >>> bool(tf.reduce_all(tape.gradient(y, w) == y))
        True

    References: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), for running a
    function again; PyTorch's hooks for saved tensors, for replacing single tensors.
    `tf.recompute_grad` copies its arguments, merges the draws, and lacks the training flag. It can
    only run the whole function again.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if isinstance(training, bool) and not tf.executing_eagerly():
        run = _with_redrawn_weights(draw, function, training, len(tensors))
    else:
        run = _with_second_run(draw, function, training, len(tensors))
    try:
        return list(run(*tensors, *seeds))
    except NotImplementedError as error:
        if "recompute_grad" not in str(error):
            raise
        raise NotImplementedError(
            "a forward-mode derivative (tf.autodiff.ForwardAccumulator) does not support a layer "
            "with parametrized weights and recompute=True: set recompute=False in the layer"
        ) from error


def _with_redrawn_weights(
    draw: Draw, function: Function, training: bool, count: int
) -> Callable[..., Any]:
    """Returns the function with a gradient that stores no effective weight, for a graph."""

    def saving(*arguments: tf.Tensor) -> Any:
        values, keys = _distinct(arguments[:count]), list(arguments[count:])
        early = delayed_seeds.seeds_after(keys, values)
        weights = [tf.identity(weight) for weight in draw(training, values, early)]
        start = weights[-1].op if weights else tf.no_op()
        outputs = function(training, values, early, weights)
        saved_tensors.delay_to_use(early, weights)
        watched = [value for value in values if _differentiable(value)]
        # Outer tensors that the function uses have gradients too.
        others = private_graph_apis.taken(outputs, [*values, *early, *weights], start)

        def backward(*upstream: Any) -> list:
            pairs = [
                (output, tf.convert_to_tensor(gradient))
                for output, gradient in zip(outputs, upstream, strict=True)
                if _differentiable(output) and gradient is not None
            ]
            targets = [output for output, _ in pairs]

            # It is a `tf.function`, because its graph detects requests for outer tensors.
            @tf.function(autograph=False)
            def pull(upstream: Tensors, values: Tensors, keys: Tensors) -> list:
                late = delayed_seeds.seeds_after(keys, upstream)
                inner = [value for value in values if _differentiable(value)]
                with tf.GradientTape(watch_accessed_variables=False) as draw_tape:
                    draw_tape.watch(inner)
                    again = draw(training, values, late)
                with saved_tensors.replaced(weights, again):
                    sources = [*weights, *watched, *others]
                    gradients = private_graph_apis.gradients(targets, sources, upstream)
                of_weights = [_dense(gradient) for gradient in gradients[: len(weights)]]
                direct = gradients[len(weights) :]
                saved_tensors.delay(late, of_weights)
                drawn = _tape_gradients(draw_tape, again, of_weights, inner)
                return _summed(direct, [*drawn, *(None for _ in others)])

            gradients = iter(pull([gradient for _, gradient in pairs], values, keys))
            of_values = [next(gradients) if _differentiable(value) else None for value in values]
            return [*(None for _ in outputs), *of_values, *(None for _ in keys), *gradients]

        @custom_gradient
        def attached(*tensors: tf.Tensor) -> Any:
            return tuple(map(tf.identity, tensors[: len(outputs)])), backward

        return attached(*outputs, *values, *keys, *others)

    return saving


def _tape_gradients(
    tape: tf.GradientTape, outputs: Tensors, upstream: Sequence[Any], sources: Tensors
) -> list:
    """Returns the gradients of a tape's outputs for its sources, or None where there is none."""
    pairs = [(o, g) for o, g in zip(outputs, upstream, strict=True) if g is not None]
    if not pairs:
        return [None for _ in sources]
    return tape.gradient(
        [output for output, _ in pairs], sources, output_gradients=[g for _, g in pairs]
    )


def _summed(direct: Sequence[Any], drawn: Sequence[Any]) -> list:
    """Returns the sums of two lists of gradients. All sums wait for the gradients in `drawn`."""
    finished = [gradient for gradient in drawn if gradient is not None]
    joined = []
    with tf.control_dependencies(finished):
        for one, other in zip(direct, drawn, strict=True):
            if one is not None and other is not None:
                joined.append(tf.convert_to_tensor(one) + tf.convert_to_tensor(other))
            elif one is not None:
                joined.append(tf.nest.map_structure(tf.identity, one, expand_composites=True))
            else:
                joined.append(other)
    return joined


def _dense(gradient: Any) -> tf.Tensor | None:
    return None if gradient is None else tf.convert_to_tensor(gradient)


def _with_second_run(
    draw: Draw, function: Function, training: bool | tf.Tensor, count: int
) -> Callable[..., Any]:
    """Returns the function with a gradient that stores only its arguments, and runs it again."""

    def run(training: bool, values: Tensors, keys: Tensors) -> Tensors:
        return function(training, values, keys, draw(training, values, keys))

    # The branches of a tf.cond must return tensors. Elsewhere None means that there is no gradient.
    dense = not isinstance(training, bool)

    @custom_gradient
    def checkpoint(*arguments: tf.Tensor) -> Any:
        values, keys = list(arguments[:count]), list(arguments[count:])
        early = delayed_seeds.seeds_after(keys, values)

        def forward(*_: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return training_flag.call_with_bool(
                training, lambda flag: tuple(run(flag, values, early))
            )

        # In eager mode a tape records and stores all operations in a custom gradient, except inside
        # `tf.recompute_grad`.
        eager = tf.executing_eagerly()
        outputs = tf.recompute_grad(forward)(*arguments) if eager else forward()

        def backward(*upstream: tf.Tensor) -> list:
            late = delayed_seeds.seeds_after(keys, upstream)
            gradients = training_flag.call_with_bool(
                training, lambda flag: _gradients(run, flag, values, late, upstream, dense)
            )
            given = iter(gradients)
            of_values = [next(given) if _differentiable(value) else None for value in values]
            return [*of_values, *(None for _ in keys)]

        return tuple(outputs), backward

    return checkpoint


def _gradients(
    run: Callable[[bool, Tensors, Tensors], Tensors],
    training: bool,
    values: Tensors,
    seeds: Tensors,
    upstream: Sequence[tf.Tensor | None],
    dense: bool,
) -> list[tf.Tensor | None]:
    """Returns d(run)/d(values) times upstream, for the values that have a gradient."""
    values = [tf.identity(value) for value in values]
    watched = [value for value in values if _differentiable(value)]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(watched)
        outputs = run(training, values, seeds)
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


def _distinct(tensors: Sequence[tf.Tensor]) -> Tensors:
    """Returns the tensors, with an identity for each repeated tensor.

    If a tensor is at two positions, TensorFlow returns the sum of its gradients at each position.
    """
    seen: set[Any] = set()
    distinct = []
    for tensor in tensors:
        distinct.append(tf.identity(tensor) if tensor.ref() in seen else tensor)
        seen.add(tensor.ref())
    return distinct


def _differentiable(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex
