"""Rules for Dense and EinsumDense, and helpers that the rules of other layers share."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.dtypes import at_least_float32
from tfwd.gradients.gradient_forms import Materialized, OuterProduct, PerExampleGradient, size
from tfwd.gradients.recorded_pass import Call
from tfwd.gradients.rules.registry import rule


def positions(tensor: tf.Tensor, last: int = 1) -> tf.Tensor:
    """Reshapes `[B, ..., (last axes)]` to `[B, P, (last axes)]`."""
    kept = [size(tensor, axis) for axis in range(tensor.shape.rank - last, tensor.shape.rank)]
    return tf.reshape(tensor, [size(tensor, 0), count(tensor, last), *kept])


def count(tensor: tf.Tensor, last: int) -> int | tf.Tensor:
    """Returns the number of positions per example, without the last axes."""
    count: Any = 1
    for axis in range(1, tensor.shape.rank - last):
        count = count * size(tensor, axis)
    return count


def bias(d: tf.Tensor) -> PerExampleGradient:
    """Returns the gradient of a bias along the last axis: `g_b = sum_p d_bp`."""
    return Materialized(tf.reduce_sum(at_least_float32(d), list(range(1, d.shape.rank - 1))))


def plain(variable: Any) -> bool:
    """Returns True if a weight is a variable. LoRA, for example, composes a weight."""
    return _keras.variables.is_variable(variable)


def activated(layer: Any, z: tf.Tensor) -> Any:
    """Applies the layer's activation."""
    return z if layer.activation is None else layer.activation(z)


@rule(keras.layers.Dense)
def dense(layer: Any, call: Call, inputs: tf.Tensor, training: Any = None) -> Any:
    """Computes `z = x W + b`: W gets `sum_p x_p d_p^T`, b gets `sum_p d_p`."""
    if not plain(layer.kernel) or inputs.shape.rank is None or isinstance(inputs, tf.SparseTensor):
        return NotImplemented
    if inputs.dtype.is_integer:
        inputs = tf.cast(inputs, layer.compute_dtype)
    z = _keras.ops.matmul(inputs, call.value(layer.kernel))
    if layer.bias is not None:
        z = _keras.ops.add(z, call.value(layer.bias))
    z = call.probe(z)
    call.use(layer.kernel, z, lambda d: OuterProduct(positions(inputs), positions(d)))
    call.use(layer.bias, z, bias)
    return activated(layer, z)


@rule(keras.layers.EinsumDense)
def einsum_dense(layer: Any, call: Call, inputs: tf.Tensor, training: Any = None) -> Any:
    """Computes `z = einsum(x, W) + b`: W gets the einsum of x and d, without the batch axis."""
    if not plain(layer.kernel):
        return NotImplemented
    letters = _letters(layer.equation, inputs.shape.rank)
    if letters is None:
        return NotImplemented
    z = _keras.ops.einsum(layer.equation, inputs, call.value(layer.kernel))
    if layer.bias is not None:
        z = _keras.ops.add(z, call.value(layer.bias))
    z = call.probe(z)
    call.use(layer.kernel, z, lambda d: _einsum_outer(*letters, inputs, d))
    if layer.bias is not None:
        call.use(layer.bias, z, lambda d: Materialized(_unbroadcast(d, layer.bias.shape)))
    return activated(layer, z)


def _letters(equation: str, rank: int) -> tuple[str, str, str] | None:
    """Returns the letters of input, kernel and output, with letters for ellipses.

    Returns None if the equation is not a product whose input and output begin with the batch axis.
    """
    left, _, output = equation.replace(" ", "").partition("->")
    given, _, kernel = left.partition(",")
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    dots = "".join(free[: rank - len(given.replace("...", ""))])
    given, output = given.replace("...", dots), output.replace("...", dots)
    if "." in kernel or not given or given[0] != output[:1] or given[0] in kernel:
        return None
    alone = set(given[1:]) - set(kernel) - set(output)
    return None if alone or len(set(given)) < len(given) else (given, kernel, output)


def _einsum_outer(
    given: str, kernel: str, output: str, x: tf.Tensor, d: tf.Tensor
) -> PerExampleGradient:
    batch = given[0]
    between = [c for c in given[1:] if c in output and c not in kernel]
    groups = [c for c in kernel if c in given and c in output]
    inner = [c for c in kernel if c in given and c not in output]
    outer = [c for c in kernel if c not in given]
    sizes = {**_sizes(given, x), **_sizes(output, d)}

    def flat(tensor: tf.Tensor, letters: str, last: list[str]) -> tf.Tensor:
        order = [batch, *between, *groups, *last]
        tensor = tf.transpose(tensor, [letters.index(c) for c in order])
        parts = [between, groups, last] if groups else [between, last]
        return tf.reshape(tensor, [sizes[batch], *(_product(sizes, part) for part in parts)])

    stored = [*groups, *inner, *outer]

    def arrange(gradients: tf.Tensor) -> tf.Tensor:
        gradients = tf.reshape(gradients, [-1, *(sizes[c] for c in stored)])
        return tf.transpose(gradients, [0, *(1 + stored.index(c) for c in kernel)])

    trivial = stored == list(kernel) and len(inner) == len(outer) == 1 and not groups
    layout = (tuple(stored), kernel, tuple(sizes[c] for c in kernel))
    return OuterProduct(
        flat(x, given, inner), flat(d, output, outer), None if trivial else arrange, layout
    )


def _sizes(letters: str, tensor: tf.Tensor) -> dict[str, Any]:
    return {letter: size(tensor, axis) for axis, letter in enumerate(letters)}


def _product(sizes: dict[str, Any], letters: list[str]) -> Any:
    product: Any = 1
    for letter in letters:
        product = product * sizes[letter]
    return product


def _unbroadcast(d: tf.Tensor, shape: Any) -> tf.Tensor:
    """Sums each example's gradient over the axes along which a weight was broadcast."""
    missing = d.shape.rank - len(shape)
    ones = [missing + i for i, n in enumerate(shape) if n == 1 and missing + i > 0]
    axes = [*range(1, missing), *ones]
    return tf.reshape(tf.reduce_sum(at_least_float32(d), axes), [size(d, 0), *shape])
