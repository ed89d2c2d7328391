"""Operations on images, which PyTorch has with the channels first."""

from __future__ import annotations

from tfwd.pretrained.flatten_order.axes import Axis
from tfwd.pretrained.flatten_order.operation_call import OperationCall, Results
from tfwd.pretrained.flatten_order.orders import MAKES_CHANNELS, OTHER_CHANNELS
from tfwd.pretrained.flatten_order.tensor_axes import like, made


def image_operation(call: OperationCall) -> Results:
    """Returns the result of a convolution or pooling that a model calls as a function."""
    tensor = call.known[0]
    shape = call.shapes[0]
    text = call.operation.get_attr("data_format")
    rank = len(tensor.axes)
    channels = 1 if text.startswith(b"NC") else rank - 1
    order = [0, channels, *(n for n in range(1, rank) if n != channels)]
    reason = f"'{call.name}' is on axes that PyTorch's model may have elsewhere"
    is_convolution = "Conv" in call.traced.kind
    for kernel in call.known[1:]:  # PyTorch has the axes of a kernel in another order
        text_of_kernel = f"'{call.name}' is a convolution with it"
        kernel.layout.contradict(text_of_kernel)
        for axis in kernel.entries:
            axis.find().doubts(text_of_kernel, of_sources=True)
    positions = [n for n in range(1, rank) if n != channels]
    needed = tuple(p for n in order if (p := tensor.places[n]) is not None)
    layout = tensor.layout
    is_made = layout.is_open and layout.possible is None
    if is_made and not is_convolution:
        layout.drop_default(reason)
        is_shown = False
    else:
        is_shown = layout.restrict([needed], reason)
    axes: list[Axis | None] = []
    for number, size in enumerate(shape):
        before = tensor.axes[number]
        if number == channels and is_convolution and "Depthwise" not in call.traced.kind:
            doubt = None if call.owners else f"'{call.name}' {MAKES_CHANNELS}"
            axes.append(None if size == 1 else Axis(size, doubt=doubt))
        elif number in (0, channels) and (1 if before is None else before.size) == size:
            axes.append(before)
        else:
            axes.append(call.dependent(size, [before]))
    if not is_convolution:
        return made(axes, reason, order) if is_shown else like(tensor, axes, reason)
    call.reads([tensor.axes[n] for n in (*positions, channels)])
    call.reads([axes[channels]], "outputs")
    used = [tensor.places[n] for n in positions if tensor.places[n] is not None]
    if len(used) > 1:
        call.recorder.record_layout(call.owners, layout, used, reason)
    return made(axes, "", order)


def resize_operation(call: OperationCall) -> Results:
    """Returns the result of a resize of images, whose channels are last in TensorFlow."""
    tensor, shape = call.inputs[0], call.shapes[0]
    if tensor is None or len(shape) != 4:
        return None
    reason = f"'{call.name}' is on axes that PyTorch's model may have elsewhere"
    needed = tuple(p for n in (0, 3, 1, 2) if (p := tensor.places[n]) is not None)
    is_shown = tensor.layout.restrict([needed], reason)
    axes = [
        axis if (1 if axis is None else axis.size) == size else call.dependent(size, [axis])
        for axis, size in zip(tensor.axes, shape, strict=True)
    ]
    return made(axes, reason, (0, 3, 1, 2)) if is_shown else like(tensor, axes, reason)


def reordered_channels(call: OperationCall) -> Results:
    """Returns the result of an exchange between channels and the pixels of a block.

    TensorFlow has the channels of a pixel's block as the last factor, PyTorch as the first one.
    """
    tensor = call.known[0]
    reason = f"'{call.name}' {OTHER_CHANNELS}"
    is_divided = call.traced.kind == "DepthToSpace"
    one = call.shapes[0][-1] if is_divided else tensor.sizes[-1]
    if is_divided and one != 1 and tensor.last is not None:
        tensor.last.find().doubts(reason, of_sources=True)
    rank = len(tensor.axes)
    needed = tuple(p for n in (0, rank - 1, *range(1, rank - 1)) if (p := tensor.places[n]))
    is_shown = tensor.layout.restrict([needed], reason)
    sizes = call.shapes[0]
    axes: list[Axis | None] = [tensor.axes[0]]
    axes += [
        call.dependent(size, [axis])
        for size, axis in zip(sizes[1:-1], tensor.axes[1:-1], strict=True)
    ]
    doubt = reason if not is_divided and one != 1 else None
    axes.append(None if sizes[-1] == 1 else Axis(sizes[-1], doubt=doubt))
    order = (0, rank - 1, *range(1, rank - 1)) if is_shown else None
    return made(axes, reason, order)
