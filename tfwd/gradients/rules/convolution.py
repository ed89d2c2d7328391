"""Rules for convolutions: at each position, a product of the kernel and the input under it."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd._keras import convolutions
from tfwd.dtypes import at_least_float32
from tfwd.gradients.gradient_forms import Materialized, OuterProduct, PerExampleGradient, size
from tfwd.gradients.recorded_pass import Call
from tfwd.gradients.rules.convolution_patches import windows
from tfwd.gradients.rules.dense import activated, bias, plain, positions
from tfwd.gradients.rules.registry import rule

CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
TRANSPOSED = (
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
)


def last(layer: Any, tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor with its channels last."""
    if layer.data_format == "channels_last":
        return tensor
    return tf.transpose(tensor, [0, *range(2, tensor.shape.rank), 1])


def biased(layer: Any, call: Call, z: tf.Tensor) -> tf.Tensor:
    """Computes `z + b`, with b along the channels."""
    if layer.bias is None:
        return z
    shape = [1] * z.shape.rank
    shape[-1 if layer.data_format == "channels_last" else 1] = -1
    return z + tf.reshape(call.value(layer.bias), shape)


def window_arguments(layer: Any) -> tuple:
    """Returns the arguments of `windows` for a layer."""
    rank = layer.rank
    strides = layer.strides if isinstance(layer.strides, tuple) else (layer.strides,) * rank
    dilation = layer.dilation_rate
    dilation = dilation if isinstance(dilation, tuple) else (dilation,) * rank
    return tuple(layer.kernel_size), strides, dilation, layer.padding


def _convolves_as_keras(layer: Any, classes: tuple[type, ...]) -> bool:
    """Returns True if the convolution is Keras's own and not overridden by a subclass."""
    method = getattr(type(layer), "convolution_op", None)
    return method is None or any(method is getattr(cls, "convolution_op", None) for cls in classes)


@rule(*CONVOLUTIONS)
def conv(layer: Any, call: Call, inputs: tf.Tensor) -> Any:
    """Computes Conv1D, Conv2D and Conv3D.

    The kernel gets the outer products of the input under it and `d`, summed over positions.
    """
    if not plain(layer.kernel) or not _convolves_as_keras(layer, CONVOLUTIONS):
        return NotImplemented
    z = convolutions.convolution(layer, inputs, call.value(layer.kernel))
    if z is None:
        return NotImplemented
    z = call.probe(biased(layer, call, z))
    call.use(layer.kernel, z, lambda d: _kernel(layer, last(layer, inputs), last(layer, d)))
    call.use(layer.bias, z, lambda d: bias(last(layer, d)))
    return activated(layer, z)


def _kernel(layer: Any, x: tf.Tensor, d: tf.Tensor) -> PerExampleGradient:
    under = tf.stack(windows(x, *window_arguments(layer)), axis=-2)  # [B, *positions, K, C]
    entries, channels, groups = under.shape[-2], under.shape[-1] // layer.groups, layer.groups
    shape = tuple(layer.kernel.shape)
    if groups == 1:
        flat = tf.reshape(under, [size(x, 0), -1, entries * channels])
        return OuterProduct(flat, positions(d), lambda g: tf.reshape(g, [-1, *shape]), shape)
    under = tf.reshape(under, [size(x, 0), -1, entries, groups, channels])
    under = tf.transpose(under, [0, 1, 3, 2, 4])  # [B, P, G, K, C/G]
    outputs = d.shape[-1] // groups
    x = tf.reshape(under, [size(x, 0), -1, groups, entries * channels])
    d = tf.reshape(d, [size(d, 0), -1, groups, outputs])

    def arrange(g: tf.Tensor) -> tf.Tensor:
        g = tf.reshape(g, [-1, groups, entries, channels, outputs])
        return tf.reshape(tf.transpose(g, [0, 2, 3, 1, 4]), [-1, *shape])

    return OuterProduct(x, d, arrange, (groups, shape))


@rule(*TRANSPOSED)
def conv_transpose(layer: Any, call: Call, inputs: tf.Tensor) -> Any:
    """Computes transposed convolutions: like `conv`, with `x` and `d` exchanged."""
    if not plain(layer.kernel):
        return NotImplemented
    z = convolutions.transposed_convolution(layer, inputs, call.value(layer.kernel))
    if z is None:
        return NotImplemented
    z = call.probe(biased(layer, call, z))
    shape = tuple(layer.kernel.shape)  # [*kernel, outputs, inputs]

    def term(d: tf.Tensor) -> PerExampleGradient:
        d = last(layer, d)
        under = tf.stack(windows(d, *window_arguments(layer)), axis=-2)
        flat = tf.reshape(under, [size(d, 0), -1, under.shape[-2] * under.shape[-1]])
        x = positions(last(layer, inputs))
        return OuterProduct(flat, x, lambda g: tf.reshape(g, [-1, *shape]), ("transposed", shape))

    call.use(layer.kernel, z, term)
    call.use(layer.bias, z, lambda d: bias(last(layer, d)))
    return activated(layer, z)


@rule(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
def depthwise_conv(layer: Any, call: Call, inputs: tf.Tensor) -> Any:
    """Computes DepthwiseConv1D and DepthwiseConv2D: each channel has its own convolution."""
    kernel = convolutions.depthwise_kernel(layer)
    if not plain(kernel):
        return NotImplemented
    z = convolutions.depthwise_convolution(layer, inputs, call.value(kernel))
    if z is None:
        return NotImplemented
    z = call.probe(biased(layer, call, z))
    call.use(kernel, z, lambda d: _depthwise(layer, last(layer, inputs), last(layer, d)))
    call.use(layer.bias, z, lambda d: bias(last(layer, d)))
    return activated(layer, z)


@rule(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
def separable_conv(layer: Any, call: Call, inputs: tf.Tensor) -> Any:
    """Computes SeparableConv1D and SeparableConv2D: a depthwise convolution and a product."""
    if not plain(layer.depthwise_kernel):
        return NotImplemented
    between = convolutions.depthwise_convolution(layer, inputs, call.value(layer.depthwise_kernel))
    if between is None:
        return NotImplemented
    between = call.probe(between)
    z = convolutions.pointwise_convolution(layer, between, call.value(layer.pointwise_kernel))
    z = call.probe(biased(layer, call, z))
    call.use(
        layer.depthwise_kernel,
        between,
        lambda d: _depthwise(layer, last(layer, inputs), last(layer, d)),
    )
    shape = tuple(layer.pointwise_kernel.shape)
    call.use(
        layer.pointwise_kernel,
        z,
        lambda d: OuterProduct(
            positions(last(layer, between)),
            positions(last(layer, d)),
            lambda g: tf.reshape(g, [-1, *shape]),
            ("pointwise", shape),
        ),
    )
    call.use(layer.bias, z, lambda d: bias(last(layer, d)))
    return activated(layer, z)


def _depthwise(layer: Any, x: tf.Tensor, d: tf.Tensor) -> PerExampleGradient:
    channels = x.shape[-1]
    d = positions(at_least_float32(d))
    d = tf.reshape(d, [size(d, 0), -1, channels, layer.depth_multiplier])
    found = [
        tf.reduce_sum(positions(at_least_float32(window))[..., tf.newaxis] * d, 1)
        for window in windows(x, *window_arguments(layer))
    ]
    shape = (*layer.kernel_size, channels, layer.depth_multiplier)
    return Materialized(tf.reshape(tf.stack(found, 1), [size(x, 0), *shape]))
