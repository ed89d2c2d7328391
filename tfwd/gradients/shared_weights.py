"""Computes the moments of a weight with several uses: sums its gradients before squaring.

    (sum_u g_ub)^2 = sum_u g_ub^2 + 2 sum_{u<v} g_ub g_vb

Uses of the same form are merged into one use with more positions. The gradients of the remaining
uses are summed example by example. A sum of rows is an exception: its products with other uses are
needed only at its own rows. An embedding tied to a softmax therefore costs no more than two
separate layers.

A weight that is used through a parametrization has the gradient `scale * g`. `scale` is the
derivative of the effective weight, for example mask/keep for dropout. The scale is the same for all
examples. The first moment is multiplied by the scale, and the second moment by its square.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfwd.gradients.embedding_gradients import Rows, scatter
from tfwd.gradients.gradient_forms import OuterProduct, PerExampleGradient, Scale, blockwise, scaled


class Scaled(NamedTuple):
    """Per-example gradients of one use, and their factor (None for 1)."""

    term: PerExampleGradient
    scale: tf.Tensor | None


def sums(uses: Sequence[Scaled], by: Scale = 1.0) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes `sum_b g_b` and `sum_b g_b^2` for the sum of all uses of one weight, times `by`."""
    groups: dict[int | None, list[PerExampleGradient]] = {}
    scales: dict[int | None, tf.Tensor | None] = {}
    for term, scale in uses:
        key = None if scale is None else id(scale)
        scales[key] = scale
        groups.setdefault(key, []).append(term)
    found = [(term, scales[key]) for key, terms in groups.items() for term in _merged(terms)]
    total, squares = None, None
    for index, (term, scale) in enumerate(found):
        first, second = term.sums(by)
        if scale is not None:
            first, second = scale * first, scale * scale * second
        total = first if total is None else total + first
        squares = second if squares is None else squares + second
        for other, other_scale in found[:index]:
            product = scaled(2 * _cross(term, other), by)
            for factor in (scale, other_scale):
                product = product if factor is None else factor * product
            squares = squares + product
    if len(found) > 1:
        squares = tf.maximum(squares, 0)
    return total, squares


def total(uses: Sequence[Scaled], by: Scale = 1.0) -> tf.Tensor:
    """Computes `sum_b g_b` for the sum of all uses of one weight, times `by`."""
    totals = [use.term.total(by) for use in uses]
    return tf.add_n(
        [t if u.scale is None else u.scale * t for u, t in zip(uses, totals, strict=True)]
    )


def _merged(terms: list[PerExampleGradient]) -> list[PerExampleGradient]:
    """Merges the terms of one sum into at most one sum of rows and at most one other term."""
    rows = [term for term in terms if isinstance(term, Rows)]
    outers = [term for term in terms if isinstance(term, OuterProduct)]
    others = [term for term in terms if not isinstance(term, (Rows, OuterProduct))]
    merged: list[PerExampleGradient] = []
    if rows:
        ids = tf.concat([tf.cast(term.ids, tf.int64) for term in rows], 1)
        merged.append(Rows(ids, tf.concat([term.d for term in rows], 1), rows[0].rows))
    kinds: dict[tuple, list[OuterProduct]] = {}
    for term in outers:
        kinds.setdefault(
            (tuple(term.x.shape[2:]), tuple(term.d.shape[2:]), term.layout), []
        ).append(term)
    for alike in kinds.values():
        x = tf.concat([term.x for term in alike], 1)
        d = tf.concat([term.d for term in alike], 1)
        others.append(OuterProduct(x, d, alike[0].arrange, alike[0].layout))
    if len(others) > 1:
        merged.append(Sum(others))
    return merged + others if len(others) == 1 else merged


class Sum(PerExampleGradient):
    """Sum of several terms, example by example."""

    def __init__(self, terms: Sequence[PerExampleGradient]) -> None:
        self.terms = list(terms)
        self.shape, self.batch = terms[0].shape, terms[0].batch

    def total(self, scale: Scale = 1.0) -> tf.Tensor:
        return tf.add_n([term.total(scale) for term in self.terms])

    def part(self, start: int | tf.Tensor, size: int | tf.Tensor) -> Sum:
        return Sum([term.part(start, size) for term in self.terms])

    def gradients(self) -> tf.Tensor:
        return tf.add_n([term.gradients() for term in self.terms])


def _cross(one: PerExampleGradient, two: PerExampleGradient) -> tf.Tensor:
    """Computes `sum_b g_b h_b` for two terms of one weight."""
    if isinstance(one, Rows) and not isinstance(two, Rows):
        one, two = two, one
    if isinstance(two, Rows) and _is_plain(one):
        outers = one.terms if isinstance(one, Sum) else [one]
        ids, sums = two.summed()
        at_rows = tf.add_n([_at_rows(outer, ids) for outer in outers])
        return scatter(ids, sums * at_rows, two.rows)
    return blockwise([one, two], lambda g, h: (tf.reduce_sum(g * h, 0),))[0]


def _is_plain(term: PerExampleGradient) -> bool:
    if isinstance(term, Sum):
        return all(_is_plain(inner) for inner in term.terms)
    return isinstance(term, OuterProduct) and term.arrange is None and term.x.shape.rank == 3


def _at_rows(outer: PerExampleGradient, ids: tf.Tensor) -> tf.Tensor:
    """Returns the rows `ids [B, S]` of each example's gradient `[I, O]`, as `[B, S, O]`."""
    assert isinstance(outer, OuterProduct)
    x = tf.gather(outer.x, ids, axis=2, batch_dims=1)
    return tf.matmul(x, outer.d, transpose_a=True)
