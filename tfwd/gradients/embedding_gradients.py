"""`Rows`: the per-example gradients of an embedding's matrix, stored for the used rows."""

from __future__ import annotations

import tensorflow as tf

from tfwd.dtypes import at_least_float32
from tfwd.gradients.gradient_forms import PerExampleGradient, Scale, scaled, size


class Rows(PerExampleGradient):
    """Gradients `g_b[i] = sum over p with id_bp = i of d_bp` of an embedding's matrix.

    Args:
        ids: Integers `[B, P]` in `[0, rows)`. Negative ids count from the end.
        d: `[B, P, D]`. Gradient of the rows that were looked up.
        rows: int. Number of rows of the matrix.

    An example's gradients of one row are summed after sorting its ids. No tensor of size
    `B x rows x D` is created.
    """

    def __init__(self, ids: tf.Tensor, d: tf.Tensor, rows: int) -> None:
        self.ids = tf.where(ids < 0, ids + rows, ids)
        self.d, self.rows = at_least_float32(d), rows
        self.shape = (rows, d.shape[-1])
        self.batch = size(d, 0)

    def sums(self, scale: Scale = 1.0) -> tuple[tf.Tensor, tf.Tensor]:
        found, sums = self.summed()
        return self.total(scale), scatter(found, scaled(sums * sums, scale), self.rows)

    def total(self, scale: Scale = 1.0) -> tf.Tensor:
        return scatter(self.ids, scaled(self.d, scale), self.rows)

    def summed(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns each example's distinct ids `[B, P]` and the sums of their gradients `[B, P, D]`.

        If an id is repeated, the remaining entries have the id 0 and the sum 0.
        """
        order = tf.argsort(self.ids, axis=1)
        ids = tf.gather(self.ids, order, batch_dims=1)
        d = tf.gather(self.d, order, batch_dims=1)
        batch, positions = size(ids, 0), size(ids, 1)
        new = tf.concat(
            [tf.zeros_like(ids[:, :1]), tf.cast(ids[:, 1:] != ids[:, :-1], ids.dtype)], 1
        )
        slot = tf.cumsum(new, axis=1) + tf.range(batch, dtype=ids.dtype)[:, tf.newaxis] * tf.cast(
            positions, ids.dtype
        )
        slots = batch * positions
        sums = tf.math.unsorted_segment_sum(
            tf.reshape(d, [slots, d.shape[-1]]), tf.reshape(slot, [slots]), slots
        )
        found = tf.math.unsorted_segment_max(
            tf.reshape(ids, [slots]), tf.reshape(slot, [slots]), slots
        )
        shape = tf.shape(d)
        return tf.reshape(tf.maximum(found, 0), shape[:2]), tf.reshape(sums, shape)

    def part(self, start: int | tf.Tensor, size: int | tf.Tensor) -> Rows:
        return Rows(self.ids[start : start + size], self.d[start : start + size], self.rows)

    def folded(self, batch: int | tf.Tensor) -> Rows:
        d = tf.reshape(self.d, [batch, -1, self.d.shape[-1]])
        return Rows(tf.reshape(self.ids, [batch, -1]), d, self.rows)

    def gradients(self) -> tf.Tensor:
        example = tf.range(size(self.ids, 0), dtype=self.ids.dtype)[:, tf.newaxis]
        flat = scatter(self.ids + example * self.rows, self.d, self.batch * self.rows)
        return tf.reshape(flat, [-1, *self.shape])


def scatter(ids: tf.Tensor, rows: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
    """Returns the sums of `rows [..., D]` by their ids, `[count, D]`."""
    flat = tf.reshape(rows, [-1, rows.shape[-1]])
    return tf.math.unsorted_segment_sum(flat, tf.reshape(ids, [-1]), count)
