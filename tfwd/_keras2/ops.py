"""Operations as Keras's layers compute them, by the names of `keras.ops`, which Keras 2 lacks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

matmul = tf.matmul
add = tf.add
einsum = tf.einsum
shape = tf.shape


def convert_to_tensor(value: Any, dtype: Any = None) -> tf.Tensor:
    """The value as a tensor, cast where it is of another dtype."""
    tensor = tf.convert_to_tensor(value)
    return tensor if dtype is None else tf.cast(tensor, dtype)


def take(table: tf.Tensor, indices: tf.Tensor, axis: int) -> tf.Tensor:
    """Slices of a tensor along an axis."""
    if axis == 0:
        return tf.nn.embedding_lookup(table, indices)
    return tf.gather(table, indices, axis=axis)


def _format(data_format: str, rank: int) -> str:
    spatial = "DHW"[3 - (rank - 2) :]
    return f"N{spatial}C" if data_format == "channels_last" else f"NC{spatial}"


def conv(
    inputs: tf.Tensor,
    kernel: tf.Tensor,
    strides: Any = 1,
    padding: str = "valid",
    data_format: str = "channels_last",
    dilation_rate: Any = 1,
) -> tf.Tensor:
    """A convolution, as `keras.layers.Conv1D` and so on compute it."""
    rank = len(inputs.shape)
    return tf.nn.convolution(
        inputs,
        kernel,
        strides=list(strides) if isinstance(strides, (tuple, list)) else strides,
        padding=padding.upper(),
        data_format=_format(data_format, rank),
        dilations=list(dilation_rate)
        if isinstance(dilation_rate, (tuple, list))
        else dilation_rate,
    )


def conv_transpose(
    inputs: tf.Tensor,
    kernel: tf.Tensor,
    strides: Any = 1,
    padding: str = "valid",
    output_padding: Any = None,
    data_format: str = "channels_last",
    dilation_rate: Any = 1,
) -> tf.Tensor:
    """A transposed convolution, as `keras.layers.Conv2DTranspose` and so on compute it."""
    rank = len(inputs.shape)
    spatial = rank - 2

    def each(value: Any) -> list:
        return list(value) if isinstance(value, (tuple, list)) else [value] * spatial

    first = 1 if data_format == "channels_last" else 2
    sizes = tf.shape(inputs)
    paddings = [None] * spatial if output_padding is None else each(output_padding)
    lengths = [
        keras.src.utils.conv_utils.deconv_output_length(
            sizes[first + i],
            kernel.shape[i],
            padding=padding,
            output_padding=paddings[i],
            stride=each(strides)[i],
            dilation=each(dilation_rate)[i],
        )
        for i in range(spatial)
    ]
    channels = kernel.shape[-2]
    outer = [sizes[0], *lengths, channels] if first == 1 else [sizes[0], channels, *lengths]
    return tf.nn.conv_transpose(
        inputs,
        kernel,
        tf.stack(outer),
        each(strides),
        padding=padding.upper(),
        data_format=_format(data_format, rank),
        dilations=each(dilation_rate),
    )


def depthwise_conv(
    inputs: tf.Tensor,
    kernel: tf.Tensor,
    strides: Any = 1,
    padding: str = "valid",
    data_format: str = "channels_last",
    dilation_rate: Any = 1,
) -> tf.Tensor:
    """A convolution of each channel by itself, as `keras.layers.DepthwiseConv2D` computes it."""
    rank = len(inputs.shape)
    if rank == 3:
        axis = 1 if data_format == "channels_last" else 2
        step = strides if isinstance(strides, int) else strides[0]
        dilation = dilation_rate if isinstance(dilation_rate, int) else dilation_rate[0]
        two = depthwise_conv(
            tf.expand_dims(inputs, axis),
            tf.expand_dims(kernel, 0),
            (step, step),
            padding,
            data_format,
            (1, dilation),
        )
        return tf.squeeze(two, axis)
    step = list(strides) if isinstance(strides, (tuple, list)) else [strides] * 2
    dilation = dilation_rate if isinstance(dilation_rate, (tuple, list)) else [dilation_rate] * 2
    steps = [1, *step, 1] if data_format == "channels_last" else [1, 1, *step]
    return tf.nn.depthwise_conv2d(
        inputs,
        kernel,
        strides=steps,
        padding=padding.upper(),
        data_format=_format(data_format, rank),
        dilations=list(dilation),
    )
