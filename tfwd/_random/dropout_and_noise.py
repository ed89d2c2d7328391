"""Dropout, mixing and noise on tensors, as pure functions of a seed.

There are two implementations.

- A *small* draw (`masks_and_normals.is_small`) is one operation, and a few more operations apply
  it. TensorFlow computes the gradient, and stores the tensors that it needs.
- Any other draw is drawn and applied in one pass, and its gradient draws it again. Only the seed is
  stored. For large tensors of static shape, the pass is one loop that XLA compiles. In this loop, a
  mask costs no more than a copy of the tensor. XLA compiles once per size. Tensors of varying shape
  therefore use the same operations one by one, with the same result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfwd import dtypes
from tfwd._graph import delayed_seeds, private_graph_apis
from tfwd._graph.cached_constants import constant
from tfwd._graph.custom_gradient import custom_gradient
from tfwd._random import masks_and_normals, xxh32
from tfwd._random.masks_and_normals import is_small, keep_probability


def drop(tensor: tf.Tensor, kept: tf.Tensor, rate: float | tf.Tensor) -> tf.Tensor:
    """Returns `tensor * (1 / keep)` where `kept` is True, and exactly zero elsewhere.

    The product is computed at least in float32, and the result has the tensor's dtype. Its gradient
    is `upstream * (1 / keep)` where `kept` is True, and exactly 0.0 elsewhere.

    Args:
        tensor: Floating tensor.
        kept: tf.bool, of a shape that broadcasts to the tensor's shape.
        rate: float or scalar tensor. Drop rate with which `kept` was drawn.

    Returns:
        A tensor of the first argument's shape and dtype.
    """
    return drop_entries(tensor, kept, tf.cast(keep_probability(rate), tf.float32))


def dropout(
    tensor: tf.Tensor,
    rate: float | tf.Tensor,
    seed: tf.Tensor,
    noise_shape: xxh32.Shape | None = None,
    rows: tf.Tensor | None = None,
) -> tf.Tensor:
    """Computes `drop(tensor, mask(noise_shape, rate, seed), rate)` without storing a large mask.

    Its gradient is the same function of the upstream gradient, with the same seed. In a branch of a
    `tf.cond`, TensorFlow cannot compute such a gradient for a tape outside the branch. In a branch,
    the mask is therefore stored.

    Args:
        tensor: Floating tensor.
        rate: float or scalar tensor. Drop rate in [0, 1).
        seed: int32 `[2]`.
        noise_shape: Shape of the mask, which broadcasts to the tensor's shape. Default None, for
            the tensor's shape.
        rows: Integers `[...]`. Indices of rows, if the tensor consists of rows of a table and has
            the shape `rows.shape + width`. Each row gets the draw that it would get in the table.
            `noise_shape` must then be given for the whole table. Default None.

    Returns:
        A tensor of the first argument's shape and dtype.

    Example:
        >>> table, ids, seed = tf.ones([5, 4]), tf.constant([3, 1]), tf.constant([1, 2])
        >>> rows = dropout(tf.gather(table, ids), 0.5, seed, table.shape, ids)
        >>> bool(tf.reduce_all(rows == tf.gather(dropout(table, 0.5, seed), ids)))
        True
    """
    shape = tensor.shape if noise_shape is None else noise_shape
    if is_small(shape):
        keep = keep_probability(rate)
        return _small_drop(
            tensor, _of_rows(masks_and_normals.small_mask(shape, keep, seed), rows), keep
        )
    keep = tf.cast(keep_probability(rate), tf.float32)
    if private_graph_apis.in_branch():
        return _run(_dropout, tensor, tf.stop_gradient(keep), seed, rows, noise_shape)

    return _linear(tensor, keep, seed, rows, noise_shape)


def mix(
    tensor: tf.Tensor,
    reference: tf.Tensor,
    rate: float | tf.Tensor,
    seed: tf.Tensor,
    noise_shape: xxh32.Shape | None = None,
    rows: tf.Tensor | None = None,
) -> tf.Tensor:
    """Computes `reference + dropout(tensor - reference, ...)` in one pass, and rounds once.

    Its gradient for the tensor is the gradient of `dropout`. The reference gets no gradient.

    Args:
        tensor: Floating tensor.
        reference: Floating tensor of the same shape.
        rate, seed, noise_shape, rows: As in `dropout`.

    Returns:
        A tensor of the first argument's shape and dtype. If the rate is 0 it is the tensor, bit for
        bit.

    Example:
        >>> mixed = mix(tf.fill([4], 3.0), tf.ones([4]), 0.5, tf.constant([1, 2]))
        >>> sorted(set(mixed.numpy().tolist()))
        [1.0, 5.0]
    """
    shape = tensor.shape if noise_shape is None else noise_shape
    reference = tf.stop_gradient(reference)
    if is_small(shape):
        keep = keep_probability(rate)
        kept = _of_rows(masks_and_normals.small_mask(shape, keep, seed), rows)
        wide = dtypes.wide(tensor.dtype)
        start = tf.cast(reference, wide)
        moved = start + _small_drop(tf.cast(tensor, wide) - start, kept, keep)
        result = tf.cast(moved, tensor.dtype)
        return result if isinstance(keep, float) else tf.where(keep >= 1.0, tensor, result)
    keep = tf.cast(keep_probability(rate), tf.float32)
    if private_graph_apis.in_branch():
        return _run(_mix, tensor, tf.stop_gradient(keep), seed, rows, noise_shape, reference)

    @custom_gradient
    def mixed(tensor: tf.Tensor, reference: tf.Tensor, keep: tf.Tensor, seed: tf.Tensor) -> Any:
        def backward(upstream: Any) -> tuple:
            return _linear_backward(upstream, keep, seed, rows, noise_shape), None, None, None

        return _run(_mix, tensor, keep, seed, rows, noise_shape, reference), backward

    return mixed(tensor, reference, keep, seed)


def noise(
    tensor: tf.Tensor,
    stddev: float | tf.Tensor,
    seed: tf.Tensor,
    rows: tf.Tensor | None = None,
    shape: xxh32.Shape | None = None,
) -> tf.Tensor:
    """Computes `tensor + stddev * e` with `e ~ N(0, I)`, without storing the noise.

    Its gradient is the upstream gradient. If `stddev` is 0 the result is the tensor, bit for bit.

    Args:
        tensor: Floating tensor.
        stddev: float or scalar tensor. Standard deviation.
        seed: int32 `[2]`.
        rows: As in `dropout`.
        shape: Shape of the table, if `rows` is given. Default None.

    Returns:
        A tensor of the first argument's shape and dtype.

    Example:
        >>> x = noise(tf.zeros([1000]), 0.1, tf.constant([1, 2]))
        >>> round(float(tf.math.reduce_std(x)), 2)
        0.1
    """
    wide = dtypes.wide(tensor.dtype)
    shape = tensor.shape if shape is None else shape
    if is_small(shape):
        drawn = _of_rows(masks_and_normals.small_normal(shape, wide, seed), rows)
        shift = drawn * tf.cast(stddev, wide)
        noisy = tf.cast(tf.cast(tensor, wide) + shift, tensor.dtype)
        if isinstance(stddev, (int, float)) and stddev > 0:
            return noisy
        # Adding 0.0 would turn -0.0 into 0.0.
        return tf.where(tf.cast(stddev, wide) <= 0, tensor, noisy)
    stddev = tf.cast(stddev, wide)
    if private_graph_apis.in_branch():
        return _run(_noise, tensor, tf.stop_gradient(stddev), seed, rows, None)

    @custom_gradient
    def shifted(tensor: tf.Tensor, stddev: tf.Tensor, seed: tf.Tensor) -> Any:
        result = _run(_noise, tensor, stddev, seed, rows, None)
        return result, lambda upstream: (upstream, None, None)

    return shifted(tensor, stddev, seed)


def _of_rows(drawn: tf.Tensor, rows: tf.Tensor | None) -> tf.Tensor:
    """Returns rows of a table's draw. If the draw has one row for all rows, returns this row."""
    if rows is None:
        return drawn
    return drawn[0] if drawn.shape[0] == 1 else tf.gather(drawn, rows)


def _scale(keep: float | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if isinstance(keep, float):
        return constant(1.0 / keep, dtype)
    return 1.0 / tf.cast(keep, dtype)


def drop_entries(tensor: tf.Tensor, kept: tf.Tensor, keep: tf.Tensor) -> tf.Tensor:
    wide = dtypes.wide(tensor.dtype)
    scaled = tf.cast(tensor, wide) * _scale(keep, wide)
    return tf.where(kept, tf.cast(scaled, tensor.dtype), tf.zeros([], tensor.dtype))


def _small_drop(tensor: tf.Tensor, kept: tf.Tensor, keep: float | tf.Tensor) -> tf.Tensor:
    """Computes `drop_entries`. TensorFlow's gradient of it is one product with the same factors."""
    wide = dtypes.wide(tensor.dtype)
    factors = tf.raw_ops.Mul(x=tf.raw_ops.Cast(x=kept, DstT=wide), y=_scale(keep, wide))
    dropped = tf.raw_ops.MulNoNan(x=tf.cast(tensor, wide), y=factors)
    return tf.cast(dropped, tensor.dtype)


def _dropout(
    tensor: tf.Tensor,
    keep: tf.Tensor,
    seed: tf.Tensor,
    rows: tf.Tensor | None,
    shape: xxh32.Shape | None,
) -> tf.Tensor:
    shape = _shape_of(tensor, rows) if shape is None else shape
    return drop_entries(
        tensor, masks_and_normals.large_mask(xxh32.counters(shape, rows), keep, seed), keep
    )


def _linear(
    tensor: tf.Tensor,
    keep: tf.Tensor,
    seed: tf.Tensor,
    rows: tf.Tensor | None,
    noise_shape: xxh32.Shape | None,
) -> tf.Tensor:
    """Computes `_dropout`, with a gradient that draws the mask again."""

    @custom_gradient
    def linear(tensor: tf.Tensor, keep: tf.Tensor, seed: tf.Tensor) -> Any:
        def backward(upstream: Any) -> tuple:
            return _linear_backward(upstream, keep, seed, rows, noise_shape), None, None

        return _run(_dropout, tensor, keep, seed, rows, noise_shape), backward

    return linear(tensor, keep, seed)


def _linear_backward(
    upstream: Any,
    keep: tf.Tensor,
    seed: tf.Tensor,
    rows: tf.Tensor | None,
    noise_shape: xxh32.Shape | None,
) -> tf.Tensor:
    upstream = tf.convert_to_tensor(upstream)
    late = seed
    if not _is_compiled(upstream, rows, noise_shape):
        # Otherwise the mask would be stored.
        (late,) = delayed_seeds.seeds_after([seed], [upstream])
    return _linear(upstream, keep, late, rows, noise_shape)


def _mix(
    tensor: tf.Tensor,
    keep: tf.Tensor,
    seed: tf.Tensor,
    rows: tf.Tensor | None,
    shape: xxh32.Shape | None,
    reference: tf.Tensor,
) -> tf.Tensor:
    shape = _shape_of(tensor, rows) if shape is None else shape
    kept = masks_and_normals.large_mask(xxh32.counters(shape, rows), keep, seed)
    wide = dtypes.wide(tensor.dtype)
    start = tf.cast(reference, wide)
    moved = start + (tf.cast(tensor, wide) - start) * _scale(keep, wide)
    mixed = tf.cast(tf.where(kept, moved, start), tensor.dtype)
    return tf.where(keep >= 1.0, tensor, mixed)


def _noise(
    tensor: tf.Tensor,
    stddev: tf.Tensor,
    seed: tf.Tensor,
    rows: tf.Tensor | None,
    shape: xxh32.Shape | None,
) -> tf.Tensor:
    counters = xxh32.counters(_shape_of(tensor, rows), rows)
    wide = stddev.dtype
    noisy = tf.cast(tensor, wide) + stddev * masks_and_normals.large_normal(counters, wide, seed)
    # Adding 0.0 would turn -0.0 into 0.0.
    return tf.where(stddev <= 0, tensor, tf.cast(noisy, tensor.dtype))


def _shape_of(tensor: tf.Tensor, rows: tf.Tensor | None) -> xxh32.Shape:
    if rows is not None:
        return (None, *tensor.shape[len(rows.shape) :])
    return tuple(tensor.shape) if tensor.shape.is_fully_defined() else tf.shape(tensor)


def _run(
    function: Callable[..., tf.Tensor],
    tensor: tf.Tensor,
    number: tf.Tensor,
    seed: tf.Tensor,
    rows: tf.Tensor | None,
    shape: xxh32.Shape | None,
    *others: tf.Tensor,
) -> tf.Tensor:
    """Returns the function's result, from one compiled loop if that is faster.

    Otherwise a function that is traced once for all weights computes the result, because building
    the operations for each weight takes longer than running them. The operations are built one by
    one for looked-up rows, for a mask with its own shape, and in a branch of a `tf.cond`. In a
    branch, the tensors that an outer gradient stores have no static shape, and XLA needs static
    shapes.
    """
    if _is_compiled(tensor, rows, shape):
        loop = (_compiled_in_branch if private_graph_apis.in_branch() else _compiled)[function]
        if shape is not None:
            return loop(tensor, number, seed, rows, shape, *others)
        # Flat tensors have the same entry numbers, and tensors of one size share a compiled loop.
        flat, *rest = (tf.reshape(entries, [-1]) for entries in (tensor, *others))
        flat = loop(flat, number, seed, None, None, *rest)
        return tf.reshape(flat, tensor.shape)
    if rows is not None or shape is not None or private_graph_apis.in_branch():
        return function(tensor, number, seed, rows, shape, *others)
    dtypes = [entries.dtype for entries in (tensor, *others)]
    result = _traced(function, number.dtype, *dtypes)(number, seed, tensor, *others)
    result.set_shape(tensor.shape)
    return result


def _is_compiled(tensor: tf.Tensor, rows: tf.Tensor | None, shape: xxh32.Shape | None) -> bool:
    # The number of looked-up rows depends on the batch, and may change from call to call.
    static = tensor.shape.is_fully_defined() and not tf.is_tensor(shape)
    return static and rows is None and tensor.shape.num_elements() >= masks_and_normals.SMALL


_compiled = {
    function: tf.function(function, jit_compile=True, autograph=False)
    for function in (_dropout, _mix, _noise)
}


def _not_inlined(function: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Returns a function whose calls stay calls in the graph that TensorFlow optimizes.

    In the gradient of a branch, other operations may wait for a loop whose result nothing needs.
    TensorFlow then replaces the call by a `NoOp`, and fails to compile it: "Function NoOp is not
    defined". It can replace a call of this function. A call takes some microseconds longer.
    """
    options = {"autograph": False, "experimental_attributes": {"_noinline": True}}
    return tf.function(lambda *arguments: function(*arguments), **options)


_compiled_in_branch = {function: _not_inlined(loop) for function, loop in _compiled.items()}


@functools.cache
def _traced(
    function: Callable[..., tf.Tensor], number: tf.DType, *tensors: tf.DType
) -> Callable[..., tf.Tensor]:
    """Traces a function for tensors of all shapes. The tensors become its last arguments."""
    return tf.function(
        lambda number, seed, tensor, *others: function(tensor, number, seed, None, None, *others),
        autograph=False,
        input_signature=[
            tf.TensorSpec([], number),
            tf.TensorSpec([2], tf.int32),
            *(tf.TensorSpec(None, dtype) for dtype in tensors),
        ],
    )
