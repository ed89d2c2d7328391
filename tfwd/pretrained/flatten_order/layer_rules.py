"""Effects of each kind of Keras layer on the axes of tensors, and the needs of its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order import layer_groups as groups
from tfwd.pretrained.flatten_order.activations import after_activation
from tfwd.pretrained.flatten_order.axes import Axis
from tfwd.pretrained.flatten_order.einsum_axes import einsum_outputs
from tfwd.pretrained.flatten_order.image_layers import (
    convolution,
    other_outputs,
    recurrent_convolution,
    resized_image,
)
from tfwd.pretrained.flatten_order.layer_call import Call
from tfwd.pretrained.flatten_order.layouts_in_torch import orders_with_last
from tfwd.pretrained.flatten_order.made_axes import dependent_axis
from tfwd.pretrained.flatten_order.normalizations import normalization, slopes
from tfwd.pretrained.flatten_order.orders import HAS_STEPS
from tfwd.pretrained.flatten_order.products import with_new_features
from tfwd.pretrained.flatten_order.reshapes import reshaped
from tfwd.pretrained.flatten_order.tensor_axes import (
    TensorAxes,
    appended,
    entries,
    in_order,
    made,
    permuted,
    with_unknown_axes,
)
from tfwd.pretrained.flatten_order.time_steps import time_distributed
from tfwd.pretrained.flatten_order.unseen_layers import reshapes_in_code, unseen_images
from tfwd.pretrained.flatten_order.unseen_orders import (
    record_hidden_reshape,
    record_kernels,
    record_unexplained,
    record_unseen,
)


def outputs_of_layer(call: Call) -> list[TensorAxes]:
    """Returns the axes of a layer's outputs. Records the axes on which it has weights."""
    layer = call.layer
    if not call.tensors or not call.tensors[0].axes:
        return [with_unknown_axes(shape, f"'{call.name}' has no input") for shape in call.shapes]
    for kinds, rule in _RULES:
        if isinstance(layer, kinds):
            results = rule(call)
            return [after_activation(call, results[0]), *results[1:]]
    return outputs_of_unknown_layer(call)


def outputs_of_unknown_layer(call: Call) -> list[TensorAxes]:
    """Returns the outputs of a layer whose call cannot be seen, and of layers of tfwd."""
    inside = _keras.layers.all_layers(call.layer)
    axes = entries(call.tensors, call.batch)
    has_images = any(isinstance(inner, groups.IMAGE_LAYERS) for inner in inside)
    reason = f"the model does not show what '{call.name}' does with its inputs"
    if has_images:
        end = "flatten" if len(call.shapes[0]) < 3 else "return"
        reason = f"'{call.name}' has convolutions inside, and may {end} an image"
    is_of_tfwd = type(call.layer).__module__.startswith("tfwd.")
    is_clear = is_of_tfwd or _keras.is_of_keras(type(call.layer), "call")
    is_known = all(len(t.used) < 3 or t.is_as_in_keras() for t in call.tensors)
    makes_image = any(sum(size != 1 for size in shape) > 2 for shape in call.shapes)
    if not is_clear and (has_images or not is_known or makes_image):
        for axis in axes if makes_image else ():
            axis.doubts(reason)
        for tensor in call.tensors:
            if len(tensor.used) > 2 and not tensor.is_as_in_keras():
                shape: Any = tensor.sizes[1:]
                takes = (
                    f"'{call.name}' takes an image of {shape}, and may flatten it for this layer"
                )
                record_unseen(call.recorder, "inputs", shape, inside, takes)
        for side, shape, text in unseen_images(inside, has_images=True):
            record_unseen(call.recorder, side, shape, inside, text)
        record_unexplained(call.recorder, inside, set())
        if reshapes_in_code(call.layer, is_traced=False):
            record_hidden_reshape(call.recorder, call.layer, inside)
        results = [with_unknown_axes(shape, reason, call.batch) for shape in call.shapes]
        call.recorder.record_hidden(inside, axes, entries(results, call.batch), reason)
        return results
    call.recorder.record_plain(inside, "inputs", axes, f"'{call.name}' has flattened features")
    results = []
    for shape in call.shapes:
        if call.tensors[0].sizes == shape:
            results.append(call.tensors[0])
            continue
        new: list[Axis | None] = [
            None if size == 1 else dependent_axis(size, axes, reason) for size in shape
        ]
        if shape and shape[0] == call.batch.size:
            new[0] = call.batch
        results.append(in_order(new) if is_known else made(new, reason, natural=()))
    made_axes = [axis for axis in entries(results, call.batch) if axis not in axes]
    call.recorder.record_hidden(inside, axes, made_axes, reason)
    return results


def _dense(call: Call) -> list[TensorAxes]:
    tensor, shape = call.tensors[0], call.shapes[0]
    call.recorder.record_axis(call.layer, "inputs", tensor.last)
    return [with_new_features(tensor, call.features(shape[-1]), call.name, call.batch)]


def _sequence_layer(call: Call) -> list[TensorAxes]:
    """Returns the outputs of an attention layer, which has the channels last in PyTorch too."""
    inside = _keras.layers.all_layers(call.layer)
    lasts = [tensor.last for tensor in call.tensors]
    call.recorder.record_plain(
        inside, "inputs", lasts, f"'{call.name}' has flattened features as inputs"
    )
    tensor, shape = call.tensors[0], call.shapes[0]
    features = None if shape[-1] == 1 else Axis(shape[-1])
    call.recorder.record_plain(
        inside, "outputs", [features], f"its outputs become an image after '{call.name}'"
    )
    first = with_new_features(tensor, features, call.name, call.batch)
    return [first, *other_outputs(call)]


def _recurrent(call: Call) -> list[TensorAxes]:
    layer, tensor = call.layer, call.tensors[0]
    cells = groups.recurrent_cells(layer)
    states = [t.last for t in call.tensors[1:]]
    reason = f"'{call.name}' {HAS_STEPS}"
    from_state = f"'{call.name}' takes flattened features as its state"
    in_cells: list[Any] = []  # layers in cells of users
    for cell in cells:
        call.recorder.record_axis(cell, "inputs", tensor.last)
        call.recorder.record_plain([cell], "inputs", [tensor.axes[1]], reason)
        for side in ("inputs", "outputs"):
            call.recorder.record_plain([cell], side, states, from_state)
        if not _keras.is_of_keras(type(cell), "call"):
            inner = [each for each in _keras.layers.all_layers(cell)]
            text = f"the cell '{cell.name}' takes a flattened image, or an image"
            call.recorder.record_plain(inner, "inputs", [tensor.last], text)
            in_cells += inner
            if len(tensor.axes) > 3:
                record_kernels(call.recorder, inner)
                record_unexplained(call.recorder, inner, set())
    if last := tensor.places[-1]:
        tensor.layout.restrict(
            orders_with_last(tensor.used, last), f"'{call.name}' takes the channels last"
        )
    results = []
    for each in call.shapes:
        axes: list[Axis | None] = [tensor.axes[0], *(None,) * (len(each) - 1)]
        if len(each) == 3:
            axes[1] = tensor.axes[1]
        axes[-1] = None if each[-1] == 1 else dependent_axis(each[-1], states, from_state)
        inside = _keras.layers.all_layers(layer)
        text = f"its outputs become an image after '{call.name}'"
        call.recorder.record_plain(inside, "outputs", [axes[-1]], text)
        text = f"the outputs of '{call.name}' become an image, and its cell may take them too"
        call.recorder.record_plain(in_cells, "inputs", [axes[-1]], text)
        if len(each) > 3:
            results.append(with_unknown_axes(each, reason, call.batch))
        else:
            results.append(in_order(axes))
    return results


def _embedding(call: Call) -> list[TensorAxes]:
    tensor, shape = call.tensors[0], call.shapes[0]
    if len(shape) == len(tensor.sizes) and shape[-1] == call.layer.input_dim:  # `reverse=True`
        reason = f"'{call.name}' multiplies flattened features by its table"
        call.recorder.record_plain([call.layer], "inputs", [tensor.last], reason)
        return [with_new_features(tensor, call.features(shape[-1]), call.name, call.batch)]
    return [appended(tensor, [call.features(shape[-1])])]


def _same_axes(call: Call) -> list[TensorAxes]:
    tensor = call.tensors[0]
    reason = f"'{call.name}' has weights for the positions of an image of {tensor.sizes[1:]}"
    call.recorder.record_plain([call.layer], "inputs", tensor.entries[1:], reason)
    return [tensor]


def _flatten(call: Call) -> list[TensorAxes]:
    tensor, name = call.tensors[0], call.name
    if groups.is_channels_first(call.layer) and len(tensor.axes) > 2:
        order = [0, *range(2, len(tensor.axes)), 1]
        axes = tuple(tensor.axes[number] for number in order)
        places = tuple(tensor.places[number] for number in order)
        tensor = TensorAxes(axes, places, tensor.layout)
    return [reshaped(tensor, call.shapes[0], name, call.batch)]


def _permute(call: Call) -> list[TensorAxes]:
    return [permuted(call.tensors[0], [0, *call.layer.dims], call.name)]


_RULES: list[tuple[Any, Callable[[Call], list[TensorAxes]]]] = [
    (keras.layers.TimeDistributed, time_distributed),
    (groups.IMAGE_SEQUENCE_LAYERS, recurrent_convolution),
    (groups.CONVOLUTIONS, convolution),
    (groups.RESIZING_LAYERS, resized_image),
    (keras.layers.Dense, _dense),
    (keras.layers.EinsumDense, einsum_outputs),
    (keras.layers.Embedding, _embedding),
    ((keras.layers.RNN, keras.layers.Bidirectional), _recurrent),
    (groups.ATTENTION_LAYERS, _sequence_layer),
    ((*groups.LAST_AXES_LAYERS, *groups.FIRST_AXIS_LAYERS), normalization),
    (keras.layers.PReLU, slopes),
    (keras.layers.Softmax, lambda call: [call.tensors[0]]),
    (keras.layers.Flatten, _flatten),
    (keras.layers.Permute, _permute),
    (groups.ORDER_PRESERVING_LAYERS, _same_axes),
]
