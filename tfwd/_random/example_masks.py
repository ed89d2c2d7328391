"""Weight dropout with a mask for each example of a batch, without storing a kernel per example.

`product` multiplies each example with its own dropped copy of one kernel. It works on blocks of a
few examples. For each block, it draws the masks, applies them and multiplies. Then it frees the
block's kernels. Backward draws the same masks again, because they depend only on the seed and the
example's index. So the memory for kernels does not grow with the batch.

XXH32 draws all masks of this module, even for small kernels, because a batch has many masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfwd import dtypes
from tfwd._graph import delayed_seeds, private_graph_apis
from tfwd._graph.cached_constants import constant
from tfwd._graph.custom_gradient import custom_gradient
from tfwd._random import dropout_and_noise, masks_and_normals, philox_op, xxh32

# Largest number of mask entries in a block (4 MB of float32, which fit into a processor's cache).
BLOCK = 1 << 20
# Largest number of examples in a block. A block has at least one example.
EXAMPLES = 32


class Letters(NamedTuple):
    """The letters of `einsum` for one example's product, in the order of their axes.

    Attributes:
        inputs: Letters of the inputs. The first letter is the batch axis.
        kernel: Letters of the kernel, without the batch axis.
        outputs: Letters of the outputs. The first letter is the batch axis.
    """

    inputs: str
    kernel: str
    outputs: str

    @property
    def kernels(self) -> str:
        """Letters of a batch of kernels."""
        return self.inputs[0] + self.kernel


def example_seeds(seed: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
    """Returns the seeds of the first examples of a batch, int32 `[count, 2]`.

    Formula: words `2 b` and `2 b + 1` of the stream of 32-bit words `Philox(key = seed)` are the
    seed of example `b`. So a seed does not depend on the number of examples.

    Args:
        seed: int32 `[2]`.
        count: Number of examples.
    """
    shape = tf.stack([count, 2]) if tf.is_tensor(count) else (count, 2)
    return philox_op.random_words(shape, philox_op.key_of(seed), constant((0, 0), tf.uint64))


def dropped(
    weight: tf.Tensor, rate: float | tf.Tensor, seed: tf.Tensor, count: int | tf.Tensor
) -> tf.Tensor:
    """Returns a dropped copy of a weight for each example of a batch.

    Args:
        weight: Floating tensor of static shape.
        rate: float or scalar tensor. Drop rate in [0, 1).
        seed: int32 `[2]`.
        count: Number of examples.

    Returns:
        `[count, *weight.shape]` in the weight's dtype.

    Example:
        >>> copies = dropped(tf.ones([3]), 0.5, tf.constant([1, 2]), 4)
        >>> copies.shape, sorted(set(copies.numpy().ravel().tolist()))
        (TensorShape([4, 3]), [0.0, 2.0])
    """
    keep = tf.cast(masks_and_normals.keep_probability(rate), tf.float32)
    return _drop(weight, keep, example_seeds(seed, count))


def product(
    letters: Letters, x: tf.Tensor, weight: tf.Tensor, rate: float | tf.Tensor, seed: tf.Tensor
) -> tf.Tensor:
    """Multiplies each example with its own dropped copy of a weight.

    Formula: `y_b = einsum(x_b, w'_b)` with `w'_b = dropped(weight, rate, seed, B)[b]`. With
    `g_b = dL/dy_b`, the gradients are `dL/dx_b = einsum(g_b, w'_b)` and
    `dL/dw = sum_b einsum(x_b, g_b) m_b / keep`.

    Backward stores only the arguments, without masks and copies of the weight. There are two
    exceptions: a branch of a `tf.cond`, and a SavedModel. In these, TensorFlow computes the
    gradient, and stores a copy of the weight for each example.

    Args:
        letters: Letters of the product.
        x: Floating `[B, ...]`, in the dtype of the product.
        weight: Floating tensor of static shape. It is dropped in its own dtype.
        rate: float or scalar tensor. Drop rate in [0, 1).
        seed: int32 `[2]`.

    Returns:
        `[B, ...]` in the dtype of `x`.

    Example:
        >>> x, w, seed = tf.ones([4, 3]), tf.ones([3, 2]), tf.constant([1, 2])
        >>> y = product(Letters("bi", "io", "bo"), x, w, 0.5, seed)
        >>> bool(tf.reduce_all(y == tf.reduce_sum(dropped(w, 0.5, seed, 4), 1)))
        True
    """
    keep = tf.cast(masks_and_normals.keep_probability(rate), tf.float32)
    if private_graph_apis.in_branch() or private_graph_apis.is_saving():
        seeds = example_seeds(seed, _size(x, 0))
        return _einsum(letters, x, _drop(weight, keep, seeds))

    @custom_gradient
    def multiplied(x: tf.Tensor, weight: tf.Tensor, keep: tf.Tensor, seed: tf.Tensor) -> Any:
        def backward(upstream: Any) -> tuple:
            upstream = tf.convert_to_tensor(upstream)
            (late,) = delayed_seeds.seeds_after([seed], [upstream])
            return *_run(_pull, letters, x, weight, upstream, keep, late), None, None

        (early,) = delayed_seeds.seeds_after([seed], [x])
        with private_graph_apis.unrecorded():
            return _run(_multiply, letters, x, weight, keep, early), backward

    return multiplied(x, weight, keep, seed)


def _multiply(
    letters: Letters, x: tf.Tensor, weight: tf.Tensor, keep: tf.Tensor, seed: tf.Tensor
) -> tf.Tensor:
    """Computes the outputs of `product`."""

    def block(x: tf.Tensor, seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        (kernels,) = _of_block(_kernels, [weight], keep, seeds)
        return _einsum(letters, x, tf.reshape(kernels, [-1, *weight.shape])), tf.zeros([])

    return _over_blocks(block, weight, seed, [x], tf.zeros([]))[0]


def _pull(
    letters: Letters,
    x: tf.Tensor,
    weight: tf.Tensor,
    upstream: tf.Tensor,
    keep: tf.Tensor,
    seed: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes the gradients of `product` for the inputs and for the weight."""
    inputs, _, outputs = letters

    def block(x: tf.Tensor, g: tf.Tensor, seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if len(inputs) == len(outputs) == 2 and letters.kernel == inputs[1] + outputs[1]:
            # Examples have no further axes, so the compiled loop can compute the products.
            kernels, of_weight = _of_block(_kernels_and_outer, [weight, x, g], keep, seeds)
        else:
            products = tf.einsum(f"{inputs},{outputs}->{letters.kernels}", x, g)
            products = tf.reshape(products, [-1, weight.shape.num_elements()])
            kernels, of_weight = _of_block(_kernels_and_sum, [weight, products], keep, seeds)
        kernels = tf.reshape(kernels, [-1, *weight.shape])
        of_x = tf.einsum(f"{outputs},{letters.kernels}->{inputs}", g, tf.cast(kernels, g.dtype))
        return of_x, tf.reshape(of_weight, weight.shape)

    zero = tf.zeros(weight.shape, dtypes.wide(weight.dtype))
    of_x, of_weight = _over_blocks(block, weight, seed, [x, upstream], zero)
    return of_x, tf.cast(of_weight, weight.dtype)


def _einsum(letters: Letters, x: tf.Tensor, kernels: tf.Tensor) -> tf.Tensor:
    equation = f"{letters.inputs},{letters.kernels}->{letters.outputs}"
    return tf.einsum(equation, x, tf.cast(kernels, x.dtype))


def _drop(weight: tf.Tensor, keep: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Returns a dropped copy of the weight for each seed."""
    kept = masks_and_normals.large_mask(xxh32.counters(tuple(weight.shape)), keep, seeds)
    return dropout_and_noise.drop_entries(weight, kept, keep)


def _kernels(weight: tf.Tensor, keep: tf.Tensor, seeds: tf.Tensor) -> tuple[tf.Tensor]:
    return (_drop(weight, keep, seeds),)


def _kernels_and_sum(
    weight: tf.Tensor, products: tf.Tensor, keep: tf.Tensor, seeds: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the dropped copies, and the sum of the products after the same dropout."""
    kept = masks_and_normals.large_mask(xxh32.counters(tuple(weight.shape)), keep, seeds)
    products = tf.cast(products, dtypes.wide(weight.dtype))
    return (
        dropout_and_noise.drop_entries(weight, kept, keep),
        tf.reduce_sum(dropout_and_noise.drop_entries(products, kept, keep), 0),
    )


def _kernels_and_outer(
    weight: tf.Tensor, x: tf.Tensor, g: tf.Tensor, keep: tf.Tensor, seeds: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes `_kernels_and_sum` of the outer products of `x` and `g`."""
    wide = dtypes.wide(weight.dtype)
    products = tf.cast(x, wide)[:, :, tf.newaxis] * tf.cast(g, wide)[:, tf.newaxis, :]
    return _kernels_and_sum(weight, products, keep, seeds)


_compiled = {
    function: tf.function(function, jit_compile=True, autograph=False)
    for function in (_kernels, _kernels_and_sum, _kernels_and_outer)
}


def _of_block(
    function: Callable[..., tuple], tensors: list[tf.Tensor], keep: tf.Tensor, seeds: tf.Tensor
) -> tuple:
    """Calls a function for one block, with the weight and matrices that have a row per example.

    A block with many entries is one loop that XLA compiles. Weights of one size share the loop,
    because they are flat, except in `_kernels_and_outer`.
    """
    weight, *rows = tensors
    size, count = weight.shape.num_elements(), seeds.shape[0]
    if function is not _kernels_and_outer:
        weight = tf.reshape(weight, [size])
    if count is not None and count * size >= masks_and_normals.SMALL:
        function = _compiled[function]
        rows = [tf.ensure_shape(each, [count, each.shape[1]]) for each in rows]
    return function(weight, *rows, keep, seeds)


def _over_blocks(
    block: Callable[..., tuple[tf.Tensor, tf.Tensor]],
    weight: tf.Tensor,
    seed: tf.Tensor,
    tensors: list[tf.Tensor],
    zero: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Calls a function for each block of examples, one block after another.

    Args:
        block: Function of the tensors' parts, and of the examples' seeds. It returns a tensor with
            a row for each example, and a tensor that is summed over all blocks.
        weight: Weight, for its size.
        seed: int32 `[2]`.
        tensors: Tensors with the batch axis first.
        zero: Zeros of the shape of the sum.

    Returns:
        The rows of all examples, and the sum.
    """
    batch = _size(tensors[0], 0)
    each = max(1, min(EXAMPLES, BLOCK // weight.shape.num_elements()))
    if isinstance(batch, int):
        each = min(each, max(batch, 1))
        count = max(1, -(-batch // each))
    else:
        count = tf.maximum(1, -(-batch // each))
    # All blocks have one size, because XLA compiles a function for each size. The last block is
    # padded with examples of zeros, which add nothing to the sum.
    padded = [_padded(tensor, count * each) for tensor in tensors]
    seeds = example_seeds(seed, count * each)
    if isinstance(count, int) and count == 1:
        outputs, total = block(*padded, seeds)
        return outputs[:batch], total
    parts = [_with_first_axes(tensor, [count, each]) for tensor in (*padded, seeds)]

    def step(i: tf.Tensor, found: tf.TensorArray, total: tf.Tensor) -> tuple:
        outputs, addend = block(*(part[i] for part in parts))
        return i + 1, found.write(i, outputs), total + addend

    found = tf.TensorArray(tensors[0].dtype, count)
    _, found, total = tf.while_loop(
        lambda i, *_: i < count, step, (0, found, zero), parallel_iterations=1
    )
    stacked = found.stack()
    joined = tf.reshape(
        stacked, [-1, *(_size(stacked, axis) for axis in range(2, stacked.shape.rank))]
    )
    return joined[:batch], total


def _padded(tensor: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
    """Adds examples of zeros at the end, up to `count` examples."""
    missing = count - _size(tensor, 0)
    if isinstance(missing, int) and not missing:
        return tensor
    return tf.pad(tensor, [[0, missing], *([0, 0] for _ in tensor.shape[1:])])


def _with_first_axes(tensor: tf.Tensor, sizes: list[Any]) -> tf.Tensor:
    rest = [_size(tensor, axis) for axis in range(1, tensor.shape.rank)]
    return tf.reshape(tensor, [*sizes, *rest])


def _size(tensor: tf.Tensor, axis: int) -> int | tf.Tensor:
    """Returns the size of an axis, as an int if it is known."""
    known = tensor.shape[axis]
    return tf.shape(tensor)[axis] if known is None else known


def _run(function: Callable[..., Any], letters: Letters, *tensors: tf.Tensor) -> Any:
    """Calls a function in a graph, because a loop of eager operations is slow."""
    if not tf.executing_eagerly():
        return function(letters, *tensors)
    specs = tuple(tf.TensorSpec(t.shape, t.dtype) for t in tensors)
    # The traced function serves all sizes of the batch and of the positions.
    signature = tuple(
        tf.TensorSpec([None] * t.shape.rank, t.dtype) if len(t.shape) and i in (0, 2) else t
        for i, t in enumerate(specs)
    )
    return _traced(function, letters, signature)(*tensors)


@functools.lru_cache(maxsize=128)
def _traced(
    function: Callable[..., Any], letters: Letters, signature: tuple[tf.TensorSpec, ...]
) -> Callable[..., Any]:
    return tf.function(
        functools.partial(function, letters), autograph=False, input_signature=signature
    )
