"""Effects of TensorFlow's operations on the axes of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

from tfwd.pretrained.flatten_order.axis_operations import (
    along_one_axis,
    arg_reduction,
    concatenation,
    gather,
    one_hot,
    reduction,
    reshape,
    resized_axes,
    split,
    strided_slice,
    top_entries,
    transpose,
)
from tfwd.pretrained.flatten_order.elementwise_operations import (
    batch_normalization,
    elementwise,
    softmax,
)
from tfwd.pretrained.flatten_order.image_operations import (
    image_operation,
    reordered_channels,
    resize_operation,
)
from tfwd.pretrained.flatten_order.operation_call import OperationCall, Results
from tfwd.pretrained.flatten_order.product_operations import einsum, product
from tfwd.pretrained.flatten_order.stacks import stack, unstack
from tfwd.pretrained.flatten_order.tensor_axes import TensorAxes, in_order, made


def outputs_of_operation(call: OperationCall) -> list[TensorAxes]:
    """Returns the axes of an operation's results."""
    rule = _RULES.get(call.traced.kind, _other)
    reads_all = len(call.known) < 2 or rule in _OF_SEVERAL
    found = rule(call) if reads_all else None
    if found is None:
        return call.unknown()
    return found if isinstance(found, list) else [found]


def _other(call: OperationCall) -> Results:
    """Returns the results of another operation, which are the same in PyTorch if its inputs are."""
    known = call.known
    is_known = all(tensor.is_as_in_keras() for tensor in known)
    is_vector = all(len(tensor.used) < 3 for tensor in known)
    sources = [axis for tensor in known for axis in tensor.entries if axis is not call.batch]
    has_handles = any(t.dtype in (tf.variant, tf.resource) for t in call.operation.inputs)
    if (
        has_handles
        or not (is_known or is_vector)
        or call.owners
        or call.operation.type in (*_WITH_FUNCTIONS, *_OTHER_IN_TORCH)
    ):
        return None
    products = {
        math.prod(axis.size or 0 for axis in tensor.entries[start:end])
        for tensor in known
        for start in range(len(tensor.entries))
        for end in range(start + 2, len(tensor.entries) + 1)
    }
    results = []
    for shape in call.shapes:
        if not products.isdisjoint(size for size in shape if size not in (None, 1)):
            return None
        axes = [call.dependent(size, sources) for size in shape]
        if shape and shape[0] == call.batch.size:
            axes[0] = call.batch
        results.append(in_order(axes) if is_known else made(axes, "", natural=()))
    return results


_WITH_FUNCTIONS = (
    *("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"),
    *("PartitionedCall", "StatefulPartitionedCall", "PyFunc", "EagerPyFunc", "XlaCallModule"),
)
# PyTorch's functions return other orders of axes, also for an image of one channel.
_OTHER_IN_TORCH = ("ExtractImagePatches", "ExtractVolumePatches")
_ELEMENTWISE = (
    *("Add", "AddN", "Sub", "Mul", "MulNoNan", "Div", "RealDiv", "DivNoNan", "FloorDiv", "Mod"),
    *("FloorMod", "TruncateDiv", "Maximum", "Minimum", "Pow", "SquaredDifference", "Atan2"),
    *("Xlogy", "Xdivy", "Xlog1py", "Greater", "GreaterEqual", "Less", "LessEqual", "Equal"),
    *("NotEqual", "LogicalAnd", "LogicalOr", "LogicalNot", "Select", "ClipByValue", "BiasAdd"),
    *("Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Sigmoid", "Tanh", "Softplus", "Softsign"),
    *("Exp", "Expm1", "Log", "Log1p", "Sqrt", "Rsqrt", "Square", "Neg", "Abs", "Sign", "Sin"),
    *("Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh", "Erf"),
    *("Erfc", "Erfinv", "Lgamma", "Digamma", "Reciprocal", "Inv", "Floor", "Ceil", "Round"),
    *("Rint", "IsNan", "IsInf", "IsFinite", "Cast", "Invert", "BitwiseAnd", "BitwiseOr"),
    *("Identity", "IdentityN", "StopGradient", "PreventGradient", "CheckNumerics", "Snapshot"),
    *("EnsureShape", "Bitcast"),
)
_CONVOLUTIONS = (
    *("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Conv2DBackpropInput", "Conv3DBackpropInput"),
    *("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D"),
)
# Rules that read all inputs. A computed size or position makes the results of others unknown.
_OF_SEVERAL = (
    *(elementwise, concatenation, stack, product, einsum, gather),
    *(image_operation, batch_normalization, _other),
)
_RULES: dict[str, Callable[[OperationCall], Results]] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    **dict.fromkeys(("Mean", "Sum", "Prod", "Max", "Min", "All", "Any"), reduction),
    **dict.fromkeys(("EuclideanNorm",), reduction),
    **dict.fromkeys(("ArgMax", "ArgMin"), arg_reduction),
    **dict.fromkeys(("Pad", "MirrorPad", "Tile", "BroadcastTo", "Slice"), resized_axes),
    **dict.fromkeys(("Cumsum", "Cumprod", "Roll", "Reverse"), along_one_axis),
    **dict.fromkeys(("Reshape", "ExpandDims", "Squeeze"), reshape),
    **dict.fromkeys(("Concat", "ConcatV"), concatenation),
    **dict.fromkeys(("MatMul", "BatchMatMul"), product),
    **dict.fromkeys(("Softmax", "LogSoftmax"), softmax),
    **dict.fromkeys(("Split", "SplitV"), split),
    **dict.fromkeys(("Gather", "ResourceGather"), gather),
    **dict.fromkeys(_CONVOLUTIONS, image_operation),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), reordered_channels),
    **dict.fromkeys(
        ("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea"),
        resize_operation,
    ),
    "ScaleAndTranslate": resize_operation,
    "FusedBatchNorm": batch_normalization,
    "StridedSlice": strided_slice,
    "Transpose": transpose,
    "Pack": stack,
    "Unpack": unstack,
    "Einsum": einsum,
    "OneHot": one_hot,
    "TopK": top_entries,
}
