"""Per-example gradients of a weight in compact forms, and their sums over the examples.

A `PerExampleGradient` represents the gradients `g_b`, `b = 1..B`, of one use of a weight. Most
forms do not store the gradients themselves. An `OuterProduct` stores the input of a product and the
gradient of its result. `Rows` stores the rows of a sparse gradient. `Materialized` stores the
gradients. Each form computes `sum_b g_b` and `sum_b g_b^2`, element by element, as cheaply as it
can.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfwd.dtypes import at_least_float32
from tfwd.gradients.block_sums import sum_over_blocks

# Size in bytes of the per-example gradients that are computed at once.
BLOCK_BYTES = 64 << 20

# Cost of an entry of a per-example gradient (to write, read, square and add it), in multiplications
# of a large matrix product. Measured on two cores: between 30 and 60.
ENTRY_COST = 40

Scale: TypeAlias = "float | tf.Tensor"


class PerExampleGradient:
    """Base class of the per-example gradients of one use of a weight.

    Attributes:
        shape: Shape of the weight.
        batch: int or scalar tensor. Number of examples.
    """

    shape: tuple[int, ...]
    batch: int | tf.Tensor

    def sums(self, scale: Scale = 1.0) -> tuple[tf.Tensor, tf.Tensor]:
        """Computes `scale sum_b g_b` and `scale sum_b g_b^2`, of the weight's shape."""
        total, squares = blockwise([self], both)
        return scaled(total, scale), scaled(squares, scale)

    def total(self, scale: Scale = 1.0) -> tf.Tensor:
        """Computes `scale sum_b g_b`."""
        return scaled(blockwise([self], lambda g: (tf.reduce_sum(g, 0),))[0], scale)

    def part(self, start: int | tf.Tensor, size: int | tf.Tensor) -> PerExampleGradient:
        """Returns the gradients of the examples `start .. start + size - 1`."""
        raise NotImplementedError

    def folded(self, batch: int | tf.Tensor) -> PerExampleGradient:
        """Returns the gradients of `batch` examples, if several rows belong to one example.

        `g_b` is the sum of the rows of example `b`.
        """
        return Materialized(self.gradients()).folded(batch)

    def gradients(self) -> tf.Tensor:
        """Returns all `g_b`, `[B, *shape]`."""
        raise NotImplementedError


class Materialized(PerExampleGradient):
    """Stored gradients, for weights that are small compared with the activations.

    Args:
        gradients: `[B, *shape]`.
    """

    def __init__(self, gradients: tf.Tensor) -> None:
        self._gradients = at_least_float32(gradients)
        self.shape = tuple(gradients.shape[1:])
        self.batch = size(gradients, 0)

    def sums(self, scale: Scale = 1.0) -> tuple[tf.Tensor, tf.Tensor]:
        total, squares = both(self._gradients)
        return scaled(total, scale), scaled(squares, scale)

    def part(self, start: int | tf.Tensor, size: int | tf.Tensor) -> Materialized:
        return Materialized(self._gradients[start : start + size])

    def folded(self, batch: int | tf.Tensor) -> Materialized:
        return Materialized(tf.reduce_sum(tf.reshape(self._gradients, [batch, -1, *self.shape]), 1))

    def gradients(self) -> tf.Tensor:
        return self._gradients


class OuterProduct(PerExampleGradient):
    """Gradients `g_b = sum_p x_bp d_bp^T` of a product's kernel, with input `x` and gradient `d`.

    Args:
        x: `[B, P, I]`: P positions (time steps, pixels), over which an example's gradient is
            summed. `[B, I]` for one position, `[B, P, G, I]` for a product in G groups.
        d: `[B, P, O]`, `[B, O]` or `[B, P, G, O]`. Gradient of the product's result.
        arrange: Function from `[n, I, O]`, or `[n, G, I, O]`, to `[n, *weight's shape]`. Default
            None, for the identity.
        layout: Hashable key. With equal layouts, `arrange` must do the same. Default None.

    With one position the squares are one more product, `sum_b (x_b^2) (d_b^2)^T`. With few
    positions they are a product over pairs of positions:
    `(sum_p x_p d_p)^2 = sum_pq (x_p x_q) (d_p d_q)`. With more positions it is cheaper to compute
    the gradients of a block of examples and square them.

    If the terms of an example's positions cancel, the terms of the pairs cancel much more. The
    squares then have an error of up to about `1e-7 (sum_p |x_p d_p|)^2` in float32. With four
    positions of inputs `300 + N(0, 1)`, of which only differences matter, the error is 1e-3 to 3e-3
    of the result.
    """

    def __init__(
        self,
        x: tf.Tensor,
        d: tf.Tensor,
        arrange: Callable[[tf.Tensor], tf.Tensor] | None = None,
        layout: Hashable = None,
    ) -> None:
        if x.shape.rank == 2:
            x, d = x[:, tf.newaxis], d[:, tf.newaxis]
        self.x, self.d, self.arrange = at_least_float32(x), at_least_float32(d), arrange
        self.layout = layout if layout is not None or arrange is None else arrange
        bare = (*x.shape[2:], d.shape[-1])
        self.shape = bare if arrange is None else tuple(arrange(tf.zeros([1, *bare])).shape[1:])
        self.batch = size(x, 0)

    def sums(self, scale: Scale = 1.0) -> tuple[tf.Tensor, tf.Tensor]:
        positions = self.x.shape[1]
        if positions is not None and 2 * _pairs(positions) <= 2 * positions + ENTRY_COST:
            return self.total(scale), self._arranged(self._pair_products(positions, scale))
        total, squares = blockwise([OuterProduct(self.x, self.d)], both)
        return self._arranged(scaled(total, scale)), self._arranged(scaled(squares, scale))

    def total(self, scale: Scale = 1.0) -> tf.Tensor:
        return self._arranged(_product(*self._scaled(self.x, self.d, scale)))

    def _scaled(self, x: tf.Tensor, d: tf.Tensor, scale: Scale) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the factors of the product, with the scale on the smaller one.

        The smaller factor is usually smaller than the product.
        """
        if x.shape[-1] < d.shape[-1]:
            return scaled(x, scale), d
        return x, scaled(d, scale)

    def part(self, start: int | tf.Tensor, size: int | tf.Tensor) -> OuterProduct:
        x, d = self.x[start : start + size], self.d[start : start + size]
        return OuterProduct(x, d, self.arrange, self.layout)

    def folded(self, batch: int | tf.Tensor) -> OuterProduct:
        x, d = (tf.reshape(t, [batch, -1, *t.shape[2:]]) for t in (self.x, self.d))
        return OuterProduct(x, d, self.arrange, self.layout)

    def gradients(self) -> tf.Tensor:
        if self.x.shape.rank == 3:
            gradients = tf.matmul(self.x, self.d, transpose_a=True)
        else:
            x, d = (tf.transpose(t, [0, 2, 1, 3]) for t in (self.x, self.d))
            gradients = tf.matmul(x, d, transpose_a=True)
        return gradients if self.arrange is None else self.arrange(gradients)

    def _arranged(self, gradient: tf.Tensor) -> tf.Tensor:
        return gradient if self.arrange is None else self.arrange(gradient[tf.newaxis])[0]

    def _pair_products(self, positions: int, scale: Scale) -> tf.Tensor:
        if positions == 1:
            return _product(*self._scaled(self.x * self.x, self.d * self.d, scale))
        first = [p for p in range(positions) for _ in range(p, positions)]
        second = [q for p in range(positions) for q in range(p, positions)]
        # Each pair of two different positions represents both orders.
        counts = tf.constant([1.0 if p == q else 2.0 for p, q in zip(first, second, strict=True)])
        counts = tf.reshape(tf.cast(counts, self.x.dtype), [-1, *[1] * (self.x.shape.rank - 2)])
        x = tf.gather(self.x, first, axis=1) * tf.gather(self.x, second, axis=1) * counts
        d = tf.gather(self.d, first, axis=1) * tf.gather(self.d, second, axis=1)
        # A sum with terms of both signs can be negative because of rounding errors.
        return tf.maximum(_product(*self._scaled(x, d, scale)), 0)


def blockwise(
    uses: Sequence[PerExampleGradient], function: Callable[..., tuple[tf.Tensor, ...]]
) -> tuple[tf.Tensor, ...]:
    """Sums `function(g, h, ..)` over blocks of examples, so that few gradients are in memory.

    Args:
        uses: Per-example gradients of one batch.
        function: Function of the gradients `[n, *shape]` of each use. It returns sums over
            examples.
    """
    entries = sum(_entries(use.shape) for use in uses)
    block = max(1, BLOCK_BYTES // (4 * entries))
    return sum_over_blocks(
        uses[0].batch,
        block,
        lambda start, size: function(*(use.part(start, size).gradients() for use in uses)),
    )


def size(tensor: tf.Tensor, axis: int) -> int | tf.Tensor:
    """Returns the size of an axis, as an int if it is known."""
    known = tensor.shape[axis]
    return tf.shape(tensor)[axis] if known is None else known


def scaled(tensor: tf.Tensor, scale: Any) -> tf.Tensor:
    """Computes `scale * tensor`."""
    if isinstance(scale, float):
        return tensor if scale == 1 else tensor * scale
    return tensor * tf.cast(scale, tensor.dtype)


def both(gradients: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the sums of gradients and of their squares over the examples."""
    return tf.reduce_sum(gradients, 0), tf.reduce_sum(gradients * gradients, 0)


def _entries(shape: Sequence[int]) -> int:
    entries = 1
    for axis in shape:
        entries *= axis
    return max(1, entries)


def _pairs(positions: int) -> int:
    return positions * (positions + 1) // 2


def _product(x: tf.Tensor, d: tf.Tensor) -> tf.Tensor:
    """Computes `sum_bp x_bp d_bp^T`, in each group."""
    if x.shape.rank == 3:
        x, d = tf.reshape(x, [-1, x.shape[-1]]), tf.reshape(d, [-1, d.shape[-1]])
        return tf.matmul(x, d, transpose_a=True)
    groups = x.shape[2]
    x = tf.transpose(tf.reshape(x, [-1, groups, x.shape[-1]]), [1, 2, 0])
    d = tf.transpose(tf.reshape(d, [-1, groups, d.shape[-1]]), [1, 0, 2])
    return tf.matmul(x, d)
