"""Products of Keras 2.15's convolutional layers: their calls without bias and activation.

The functions take the layer, its inputs, and a replacement for its kernel. They return None for a
case that they do not support.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.utils import conv_utils


def convolution(layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor | None:
    """Computes the product of Conv1D, Conv2D and Conv3D."""
    if inputs.shape.rank != layer.rank + 2:  # Keras allows several batch axes
        return None
    if layer._is_causal:
        inputs = tf.pad(inputs, layer._compute_causal_padding(inputs))
    # On a CPU only a compiled convolution supports groups.
    own = layer._jit_compiled_convolution_op if layer.groups > 1 else layer.convolution_op
    return own(inputs, kernel)


def transposed_convolution(layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor | None:
    """Computes the product of Conv1DTranspose, Conv2DTranspose and Conv3DTranspose.

    Dilated layers are not supported.
    """
    if any(rate != 1 for rate in layer.dilation_rate):
        return None
    first = 1 if layer.data_format == "channels_last" else 2
    dynamic = tf.shape(inputs)
    padding = layer.output_padding or (None,) * layer.rank
    lengths = [
        conv_utils.deconv_output_length(
            dynamic[first + axis] if (known := inputs.shape[first + axis]) is None else known,
            layer.kernel_size[axis],
            padding=layer.padding,
            output_padding=padding[axis],
            stride=layer.strides[axis],
        )
        for axis in range(layer.rank)
    ]
    shape = (dynamic[0], *lengths, layer.filters)
    if first == 2:
        shape = (dynamic[0], layer.filters, *lengths)
    if layer.rank == 2:  # Keras has its own function, which supports channels first on a CPU
        return keras.backend.conv2d_transpose(
            inputs, kernel, shape, layer.strides, layer.padding, layer.data_format
        )
    return tf.nn.conv_transpose(
        inputs,
        kernel,
        tf.stack(shape),
        list(layer.strides),
        padding=layer.padding.upper(),
        data_format=conv_utils.convert_data_format(layer.data_format, layer.rank + 2),
    )


def depthwise_convolution(layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor | None:
    """Computes the product of a depthwise layer, and the first product of a separable layer."""
    if layer.padding == "causal":
        return None
    strides, dilation = layer.strides, layer.dilation_rate
    if layer.rank == 2:
        return keras.backend.depthwise_conv2d(
            inputs, kernel, strides, layer.padding, layer.data_format, dilation
        )
    axis = 1 if layer.data_format == "channels_last" else 2
    found = keras.backend.depthwise_conv2d(
        tf.expand_dims(inputs, axis),
        tf.expand_dims(kernel, 0),
        strides * 2,
        layer.padding,
        layer.data_format,
        (1, *dilation),
    )
    return tf.squeeze(found, [axis])


def pointwise_convolution(layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """Computes the second product of SeparableConv1D and SeparableConv2D."""
    return tf.nn.convolution(
        inputs,
        kernel,
        padding="VALID",
        data_format=conv_utils.convert_data_format(layer.data_format, layer.rank + 2),
    )


def depthwise_kernel(layer: Any) -> Any:
    """Returns the only kernel of a depthwise convolution."""
    return layer.depthwise_kernel
