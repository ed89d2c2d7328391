"""Runs a function on effective weights, and recomputes these in backward.

`call` computes `weights = draw(tensors, seeds)` and `outputs = function(tensors, weights)`. What
the gradient of the function asks for again is kept as ever, with one exception: a tensor that was
computed from the effective weights alone is computed again from the raw weights and the seeds.
Since a draw is a pure function of its seed, both draws are the same. This is one mechanism for
every function, whatever operations it is made of; there are two ways to it.

*In a graph* the gradient of the function is built as ever, in a graph of its own that notices when
an effective weight, or something computed from nothing else (its transpose, a cast), would be
kept, and takes it from a new draw instead (`tfwd._graph.saved_tensors`). The function runs once.

*In eager mode, or under a training flag that is a tensor*, there is no such moment: backward runs
the function a second time from its arguments, which are then all that is kept.

The order of operations is the executor's choice in a graph, equal operations are merged, and both
could undo the saving:

- A draw that depends on a seed alone can be made at time zero, so that the draws of all layers are
  alive at once. Forward's seeds are made to depend on the function's input, and each on what its
  weight is first used with: a function may be a whole model.
- Backward's draw equals forward's, so that an optimizer would make one of the two and keep it
  alive between them. Backward's seeds are made to depend on the incoming gradient, by data, which
  an optimizer cannot see through (`waiting.after`).
- Backward could draw while the product that gives the weight's gradient is being computed, and go
  on to the next layer before the gradient of the raw weight is finished, so that the buffers of
  two layers are alive at once. The draw waits for the product, and the gradient of the inputs for
  that of the raw weights.

`docs/recompute.md` shows what is alive when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfwd import training_flag
from tfwd._graph import graphs, saved_tensors, waiting
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
        draw: a pure function that returns the effective weights.
        function: a function of its arguments alone, which changes nothing. It must return the same
            number of tensors of the same dtypes for either flag. A tensor that it takes from
            elsewhere gets no gradient where the function is run again.
        training: the training flag that is passed on; for a tensor, as a Python bool in each
            branch of a `tf.cond`.
        tensors: the arguments with respect to which there are gradients (of floating or complex
            dtype), and others.
        seeds: integer tensors, one for each effective weight.

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

    References: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), for running
    again; the hooks on saved tensors of PyTorch, for replacing single ones. `tf.recompute_grad`
    copies its arguments, merges the draws, lacks the training flag, and can only run all again.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if isinstance(training, bool) and not tf.executing_eagerly():
        run = _saving(draw, function, training, len(tensors))
    else:
        run = _running_again(draw, function, training, len(tensors))
    try:
        return list(run(*tensors, *seeds))
    except NotImplementedError as error:
        if "recompute_grad" not in str(error):
            raise
        raise NotImplementedError(
            "a forward-mode derivative (tf.autodiff.ForwardAccumulator) through a layer with "
            "perturbed weights needs recompute=False"
        ) from error


def _saving(draw: Draw, function: Function, training: bool, count: int) -> Callable[..., Any]:
    """Returns the function with a gradient that keeps no effective weight, for use in a graph."""

    def saving(*arguments: tf.Tensor) -> Any:
        values, keys = _places(arguments[:count]), list(arguments[count:])
        early = waiting.after(keys, values)
        weights = [tf.identity(weight) for weight in draw(training, values, early)]
        start = weights[-1].op if weights else tf.no_op()
        outputs = function(training, values, early, weights)
        saved_tensors.delay_to_use(early, weights)
        watched = [value for value in values if _differentiable(value)]
        # Tensors that the function took from elsewhere have gradients too.
        others = graphs.taken(outputs, [*values, *early, *weights], start)

        def backward(*upstream: Any) -> list:
            pairs = [
                (output, tf.convert_to_tensor(gradient))
                for output, gradient in zip(outputs, upstream, strict=True)
                if _differentiable(output) and gradient is not None
            ]
            targets = [output for output, _ in pairs]

            # A function, for the sake of its graph, in which requests are noticed.
            @tf.function(autograph=False)
            def pull(upstream: Tensors, values: Tensors, keys: Tensors) -> list:
                late = waiting.after(keys, upstream)
                inner = [value for value in values if _differentiable(value)]
                with tf.GradientTape(watch_accessed_variables=False) as draw_tape:
                    draw_tape.watch(inner)
                    again = draw(training, values, late)
                with saved_tensors.replaced(weights, again):
                    sources = [*weights, *watched, *others]
                    gradients = graphs.gradients(targets, sources, upstream)
                of_weights = [_dense(gradient) for gradient in gradients[: len(weights)]]
                direct = gradients[len(weights) :]
                saved_tensors.delay(late, of_weights)
                drawn = _pull(draw_tape, again, of_weights, inner)
                return _joined(direct, [*drawn, *(None for _ in others)])

            gradients = iter(pull([gradient for _, gradient in pairs], values, keys))
            of_values = [next(gradients) if _differentiable(value) else None for value in values]
            return [*(None for _ in outputs), *of_values, *(None for _ in keys), *gradients]

        @custom_gradient
        def attached(*tensors: tf.Tensor) -> Any:
            return tuple(map(tf.identity, tensors[: len(outputs)])), backward

        return attached(*outputs, *values, *keys, *others)

    return saving


def _pull(
    tape: tf.GradientTape, outputs: Tensors, upstream: Sequence[Any], sources: Tensors
) -> list:
    """Returns the gradients of a tape's outputs with respect to its sources; None where there is none."""
    pairs = [(o, g) for o, g in zip(outputs, upstream, strict=True) if g is not None]
    if not pairs:
        return [None for _ in sources]
    return tape.gradient(
        [output for output, _ in pairs], sources, output_gradients=[g for _, g in pairs]
    )


def _joined(direct: Sequence[Any], drawn: Sequence[Any]) -> list:
    """Returns the sums of two lists of gradients; those of no raw weight wait for those that are."""
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


def _running_again(
    draw: Draw, function: Function, training: bool | tf.Tensor, count: int
) -> Callable[..., Any]:
    """Returns the function with a gradient that keeps its arguments only, and runs it again."""

    def whole(training: bool, values: Tensors, keys: Tensors) -> Tensors:
        return function(training, values, keys, draw(training, values, keys))

    # The branches of a tf.cond must return tensors; elsewhere None says that there is no gradient.
    dense = not isinstance(training, bool)

    @custom_gradient
    def checkpoint(*arguments: tf.Tensor) -> Any:
        values, keys = list(arguments[:count]), list(arguments[count:])
        early = waiting.after(keys, values)

        def forward(*_: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return training_flag.each(training, lambda flag: tuple(whole(flag, values, early)))

        # In eager mode a tape records, and keeps, all that happens in a custom gradient; inside
        # `tf.recompute_grad` it does not.
        eager = tf.executing_eagerly()
        outputs = tf.recompute_grad(forward)(*arguments) if eager else forward()

        def backward(*upstream: tf.Tensor) -> list:
            late = waiting.after(keys, upstream)
            gradients = training_flag.each(
                training, lambda flag: _gradients(whole, flag, values, late, upstream, dense)
            )
            given = iter(gradients)
            of_values = [next(given) if _differentiable(value) else None for value in values]
            return [*of_values, *(None for _ in keys)]

        return tuple(outputs), backward

    return checkpoint


def _gradients(
    whole: Callable[[bool, Tensors, Tensors], Tensors],
    training: bool,
    values: Tensors,
    seeds: Tensors,
    upstream: Sequence[tf.Tensor | None],
    dense: bool,
) -> list[tf.Tensor | None]:
    """d(whole)/d(values) times upstream, for the values that have a gradient."""
    values = [tf.identity(value) for value in values]
    watched = [value for value in values if _differentiable(value)]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(watched)
        outputs = whole(training, values, seeds)
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


def _places(tensors: Sequence[tf.Tensor]) -> Tensors:
    """Returns the tensors, with an identity for each that stood in the list before.

    What is asked for the gradients of one tensor at two places gives all of it at either place.
    """
    seen: set[Any] = set()
    places = []
    for tensor in tensors:
        places.append(tf.identity(tensor) if tensor.ref() in seen else tensor)
        seen.add(tensor.ref())
    return places


def _differentiable(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex
