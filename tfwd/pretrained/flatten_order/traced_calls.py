"""Graph of a layer that has none, such as a subclassed model: one call of it is traced.

The layers inside, and TensorFlow's operations between them, become the nodes of the graph.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import call_interception
from tfwd._keras_shared.model_graph import Graph, in_order_of_inputs
from tfwd.pretrained.flatten_order.traced_operations import OperationRecorder

# Number of examples in the traced call. It is prime, and no other axis has this size.
_EXAMPLES = 8191
_IDS = ("float32", "int32")  # dtypes that are tried for inputs, whose dtype Keras does not store


def is_traceable(layer: Any) -> bool:
    """Returns True for a custom layer or subclassed model that calls the layers inside it."""
    if not isinstance(layer, keras.layers.Layer) or not _keras.layers.sublayers(layer):
        return False
    defined = _keras.calls_of(type(layer))
    return not _keras.is_of_keras(defined) and not defined.__module__.startswith("tfwd.")


def traced_graph(layer: Any, shapes: Any = None) -> Graph | None:
    """Returns the graph of a call of a layer; None if it cannot be traced.

    Args:
        layer: Layer that `is_traceable`.
        shapes: Shape of the only argument, without the batch. Default None: the arguments of the
            first call of the layer.
    """
    if not is_traceable(layer) or not _keras.layer_building.has_weights(layer):
        return None
    if shapes is None:
        signature = _keras.layer_building.call_signature(layer)
    else:
        signature = (tf.TensorSpec((None, *shapes)),), {}
    if signature is None or any(
        not isinstance(spec, tf.TensorSpec) or not spec.shape.rank
        for spec in tf.nest.flatten(signature)
    ):
        return None
    for dtype in _IDS:
        # A call may fail for many reasons that do not matter here, such as a missing argument.
        with contextlib.suppress(Exception):
            return _traced(layer, *_placeholder_specs(signature, dtype))
    return None


def _placeholder_specs(signature: Any, ids: str) -> Any:
    """Returns the specifications with a number of examples, and with the dtype of ids."""

    def changed(spec: tf.TensorSpec) -> tf.TensorSpec:
        dtype = ids if spec.shape.rank < 3 and spec.dtype == tf.float32 else spec.dtype
        return tf.TensorSpec((_EXAMPLES, *spec.shape[1:]), dtype)

    return tf.nest.map_structure(changed, signature)


def _traced(layer: Any, args: tuple, kwargs: dict[str, Any]) -> Graph:
    """Calls a layer with symbolic tensors. Returns the graph of the call."""
    graph = tf.__internal__.FuncGraph("tfwd_order")
    calls = _Calls(layer, graph)
    owners = [_keras.calls_of(type(inner)) for inner in _keras.layers.all_layers(layer)]
    if "training" in inspect.signature(type(layer).call).parameters:
        kwargs = {**kwargs, "training": False}
    with (
        _keras.layers.kept_losses(layer),
        graph.as_default(),
        _functions_are_inline(),
        call_interception.Captured(),
        call_interception.intercepted(owners, calls.handle),
        call_interception.users_code(),
    ):
        args, kwargs = tf.nest.map_structure(_placeholder, (args, kwargs))
        inputs = _tensors(args, kwargs)
        outputs = _tensors((layer(*args, **kwargs),), {})
    recorder = OperationRecorder(inputs, graph.captures)
    for call in calls.made:
        recorder.add_layer(*call)
    return Graph(inputs, recorder.tensors(outputs), recorder.nodes, calls.callers)


def _placeholder(spec: Any) -> Any:
    if not isinstance(spec, tf.TensorSpec):
        return spec
    return tf.compat.v1.placeholder(spec.dtype, spec.shape)


class _Calls:
    """Calls of the layers inside a layer. Calls inside these layers are not stored.

    Args:
        root: The layer.
        graph: Graph in which it is called.

    Attributes:
        made: Layer, arguments and results of each call.
        callers: Layers that call other layers. Their own calls are not in `made`.
    """

    def __init__(self, root: Any, graph: tf.Graph) -> None:
        self._root, self._graph, self._is_inside = root, graph, False
        self.made: list[tuple[Any, list[Any], list[Any]]] = []
        self.callers: list[Any] = []

    def handle(
        self, owner: type, layer: Any, original: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """Calls a layer in place of its own `call`, and stores the call."""
        if self._is_inside:
            return original(*args, **kwargs)
        if layer is self._root or is_traceable(layer):
            self.callers.append(layer)
            return original(*args, **kwargs)
        if _keras.present_graph() is not self._graph:
            raise NotImplementedError(f"'{layer.name}' is called in a loop or a branch")
        self._is_inside = True
        try:
            outputs = original(*args, **kwargs)
        finally:
            self._is_inside = False
        given = args[0] if args else None
        arguments = in_order_of_inputs(
            given, _keras.layers.input_names(layer), _tensors(args, kwargs)
        )
        ids = set(map(id, arguments))
        outputs = tf.nest.map_structure(
            lambda tensor: tf.identity(tensor) if id(tensor) in ids else tensor, outputs
        )
        self.made.append((layer, arguments, _tensors((outputs,), {})))
        return outputs


def _tensors(args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """Returns the tensors among the arguments of a call, without masks."""
    named = [value for name, value in kwargs.items() if "mask" not in name]
    found = [t for t in tf.nest.flatten((args, named)) if tf.is_tensor(t)]
    if any(not isinstance(tensor, tf.Tensor) for tensor in found):
        raise NotImplementedError("ragged and sparse tensors have other operations")
    return [tensor for tensor in found if tensor.dtype != tf.bool]


@contextlib.contextmanager
def _functions_are_inline() -> Iterator[None]:
    """Traces each `tf.function` as a part of the function that calls it."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)
