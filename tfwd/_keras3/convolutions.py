"""The products of Keras 3's convolutional layers: their calls without bias and activation.

Each takes the layer, its inputs and what is to be computed with in place of its kernel, and returns
None for what it does not cover.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


def convolution(layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor | None:
    """Of Conv1D, Conv2D and Conv3D."""
    causal = layer.padding == "causal"
    return keras.ops.conv(
        tf.pad(inputs, layer._compute_causal_padding()) if causal else inputs,
        kernel,
        strides=list(layer.strides),
        padding="valid" if causal else layer.padding,
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )


def transposed(layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor | None:
    """Of Conv1DTranspose, Conv2DTranspose and Conv3DTranspose."""
    return keras.ops.conv_transpose(
        inputs,
        kernel,
        strides=list(layer.strides),
        padding=layer.padding,
        output_padding=layer.output_padding,
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )


def depthwise(layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor | None:
    """Of DepthwiseConv1D and DepthwiseConv2D, and the first of the two of a separable one."""
    return keras.ops.depthwise_conv(
        inputs,
        kernel,
        strides=layer.strides,
        padding=layer.padding,
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )


def pointwise(layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """The second of the two of SeparableConv1D and SeparableConv2D."""
    return keras.ops.conv(
        inputs,
        kernel,
        strides=1,
        padding="valid",
        dilation_rate=1,
        data_format=layer.data_format,
    )


def depthwise_kernel(layer: Any) -> Any:
    """The only kernel of a depthwise convolution."""
    return layer.kernel
