"""Products of Keras 3's convolutional layers: their calls without bias and activation.

The functions take the layer, its inputs, and a replacement for its kernel. They return None for a
case that they do not support.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


def convolution(layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor | None:
    """Computes the product of Conv1D, Conv2D and Conv3D."""
    causal = layer.padding == "causal"
    return keras.ops.conv(
        tf.pad(inputs, layer._compute_causal_padding()) if causal else inputs,
        kernel,
        strides=list(layer.strides),
        padding="valid" if causal else layer.padding,
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )


def transposed_convolution(layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor | None:
    """Computes the product of Conv1DTranspose, Conv2DTranspose and Conv3DTranspose."""
    return keras.ops.conv_transpose(
        inputs,
        kernel,
        strides=list(layer.strides),
        padding=layer.padding,
        output_padding=layer.output_padding,
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )


def depthwise_convolution(layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor | None:
    """Computes the product of a depthwise layer, and the first product of a separable layer."""
    return keras.ops.depthwise_conv(
        inputs,
        kernel,
        strides=layer.strides,
        padding=layer.padding,
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )


def pointwise_convolution(layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """Computes the second product of SeparableConv1D and SeparableConv2D."""
    return keras.ops.conv(
        inputs,
        kernel,
        strides=1,
        padding="valid",
        dilation_rate=1,
        data_format=layer.data_format,
    )


def depthwise_kernel(layer: Any) -> Any:
    """Returns the only kernel of a depthwise convolution."""
    return layer.kernel
