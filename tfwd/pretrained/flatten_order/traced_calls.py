"""Graph of a model or layer: one call of it is traced.

The layers inside, and TensorFlow's operations between them, become the nodes of the graph.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfwd import _keras
from tfwd._keras import call_interception
from tfwd.pretrained.flatten_order.layer_groups import has_image_layers, is_composite
from tfwd.pretrained.flatten_order.traced_operations import Graph, OperationRecorder

_IDS = ("float32", "int32")  # Keras 3 does not store the dtype of inputs, which may be ids
Call = tuple[tuple, dict[str, Any]]


def traced_graph(layer: Any, call: Call | None = None, tensors: Sequence[Any] = ()) -> Graph | None:
    """Returns the graph of a call of a layer; None if it cannot be traced.

    Args:
        layer: A layer that `is_composite`.
        call: Arguments of the call, with a symbolic tensor or a `tf.TensorSpec` for each tensor.
            Default None: the arguments of the layer's first call.
        tensors: The tensors in `call` that are the inputs of the graph, in their order. Default:
            all tensors except masks.
    """
    if not _keras.layer_building.has_weights(layer):
        return None
    inputs = _keras.layers.symbolic_inputs(layer)
    if call is None and inputs is not None:
        call = (inputs,), {}
    call = call or _keras.layer_building.call_signature(layer)
    if call is None or not all(_has_axes(t) for t in tf.nest.flatten(call) if _is_symbolic(t)):
        return None
    for dtype in _IDS:
        # A call may fail for many reasons that do not matter here, such as a missing argument.
        with contextlib.suppress(Exception):
            return _traced(layer, *call, tensors, dtype)
    return None


def _number_of_examples(layer: Any, call: Any) -> int:
    """Returns a prime number that divides the size of no axis of a weight or an argument."""
    shapes = [
        value.shape
        for value in (*_keras.variables.weights(layer), *tf.nest.flatten(call))
        if hasattr(value, "shape")
    ]
    sizes = {size for shape in shapes for size in shape if size}
    primes = (n for n in range(1009, 10**6) if all(n % k for k in range(2, math.isqrt(n) + 1)))
    return next(prime for prime in primes if all(size % prime for size in sizes))


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, (tf.TensorSpec, _keras.layers.KerasTensor))


def _has_axes(tensor: Any) -> bool:
    """Returns True for a tensor with a known number of axes, one or more."""
    return bool(tf.TensorShape(tensor.shape).rank)


def _traced(
    layer: Any, args: tuple, kwargs: dict[str, Any], tensors: Sequence[Any], ids: str
) -> Graph:
    """Calls a layer with symbolic tensors. Returns the graph of the call.

    Args:
        layer: The layer.
        args, kwargs: Arguments of the call, as in `traced_graph`.
        tensors: As in `traced_graph`.
        ids: str. Dtype of tensors with one or two axes, if their dtype is not known.
    """
    graph = tf.__internal__.FuncGraph("tfwd_order")
    calls = _Calls(layer, graph)
    examples = _number_of_examples(layer, (args, kwargs))
    made: dict[int, tf.Tensor] = {}  # placeholders
    inside = _keras.layers.all_layers(layer)
    owners = [_keras.calls_of(type(inner)) for inner in inside]
    if "training" in inspect.signature(type(layer).call).parameters:
        kwargs = {**kwargs, "training": False}

    def placeholder(value: Any) -> Any:
        if not _is_symbolic(value):
            return value
        if id(value) in made:
            return made[id(value)]
        is_known = not isinstance(value, tf.TensorSpec) or value.dtype != tf.float32
        dtype = value.dtype if is_known or len(value.shape) > 2 else ids
        return made.setdefault(
            id(value), tf.compat.v1.placeholder(dtype, (examples, *value.shape[1:]))
        )

    with (
        _keras.layers.kept_losses(layer),
        _kept_attributes(inside),
        graph.as_default(),
        _functions_are_inline(),
        call_interception.Captured(),
        call_interception.intercepted(owners, calls.handle),
        call_interception.users_code(),
    ):
        args, kwargs = tf.nest.map_structure(placeholder, (args, kwargs))
        inputs = [made[id(tensor)] for tensor in tensors] or _tensors(args, kwargs, masks=True)
        outputs = _tensors((layer(*args, **kwargs),), {})
    recorder = OperationRecorder(inputs, graph.captures, calls.layer_names)
    for call in calls.made:
        recorder.add_layer(*call)
    results, callers = recorder.tensors(outputs), calls.callers
    if not any(map(has_image_layers, recorder.on_constants)):  # otherwise they may make an image
        callers += recorder.on_constants
    return Graph(inputs, results, recorder.nodes, callers, recorder.reshaped)


@contextlib.contextmanager
def _kept_attributes(layers: Sequence[Any]) -> Iterator[None]:
    """Restores the attributes in which calls have left symbolic tensors, after the body."""
    before = [(vars(layer), dict(vars(layer))) for layer in layers]
    lists = [value for _, old in before for value in old.values() if isinstance(value, list)]
    lengths = list(map(len, lists))
    try:
        yield
    finally:
        for present, old in before:
            left = {
                name
                for name, value in present.items()
                if value is not old.get(name) and _holds_symbolic(value)
            }
            for name in left:
                del present[name]
            present.update((name, old[name]) for name in left & old.keys())
        for value, length in zip(lists, lengths, strict=True):
            if _holds_symbolic(value[length:]):
                del value[length:]


def _holds_symbolic(value: Any) -> bool:
    held = tf.nest.flatten(value) if isinstance(value, (list, tuple, dict)) else [value]
    return any(isinstance(each, tf.Tensor) and tf.is_symbolic_tensor(each) for each in held)


class HiddenCall(Exception):
    """A layer is called where a trace does not see its tensors."""


class _Calls:
    """Calls of the layers inside a layer. Calls inside these layers are not stored.

    Args:
        root: The layer.
        graph: Graph in which it is called.

    Attributes:
        made: Layer, arguments and results of each call.
        callers: Layers that call other layers. Their own calls are not in `made`.
        layer_names: By the name of an operation: the layer of Keras without weights that calls it.
    """

    def __init__(self, root: Any, graph: tf.Graph) -> None:
        self._root, self._graph, self._is_inside = root, graph, False
        self.made: list[tuple[Any, list[Any], list[Any]]] = []
        self.callers: list[Any] = []
        self.layer_names: dict[str, str] = {}

    def handle(
        self, owner: type, layer: Any, original: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """Calls a layer in place of its own `call`, and stores the call."""
        if self._is_inside:
            return original(*args, **kwargs)
        call = self._call_leaf
        if layer is self._root or is_composite(layer):
            call = self._call_composite
        state = len(self.made), len(self.callers)
        shown: Any = None
        try:
            return call(layer, original, args, kwargs)
        except HiddenCall:
            if layer is self._root or call == self._call_leaf:
                raise
        except Exception:
            shown = None if layer is self._root else _keras.layers.symbolic_outputs(layer)
            if shown is None:
                raise
        del self.made[state[0] :], self.callers[state[1] :]
        if shown is not None:
            return self._add_unknown(layer, args, kwargs, shown)
        return self._call_leaf(layer, original, args, kwargs)

    def _call_composite(
        self, layer: Any, original: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """Calls a layer whose call shows what it does."""
        self.callers.append(layer)
        is_simple = not layer.weights and _keras.is_of_keras(type(layer), "call")
        before = len(self._graph.get_operations()) if is_simple else 0
        outputs = original(*args, **kwargs)
        for operation in self._graph.get_operations()[before:] if is_simple else ():
            self.layer_names.setdefault(operation.name, layer.name)
        return outputs

    def _call_leaf(
        self, layer: Any, original: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """Calls another layer, and stores the call."""
        if _keras.present_graph() is not self._graph:
            raise HiddenCall(f"'{layer.name}' is called in a loop or a branch")
        self._is_inside = True
        try:
            outputs = original(*args, **kwargs)
        finally:
            self._is_inside = False
        arguments = _tensors(args, kwargs)
        ids = set(map(id, arguments))
        outputs = tf.nest.map_structure(
            lambda tensor: tf.identity(tensor) if id(tensor) in ids else tensor, outputs
        )
        self.made.append((layer, arguments, _tensors((outputs,), {})))
        return outputs

    def _add_unknown(self, layer: Any, args: tuple, kwargs: dict, shown: Any) -> Any:
        """Stores a call that fails. Returns tensors with the shapes that Keras knows."""
        arguments = _tensors(args, kwargs)
        examples = arguments[0].shape[0]

        def placeholder(tensor: Any) -> tf.Tensor:
            return tf.compat.v1.placeholder(tensor.dtype, (examples, *tensor.shape[1:]))

        outputs = tf.nest.map_structure(placeholder, shown)
        self.made.append((layer, arguments, _tensors((outputs,), {})))
        return outputs


def _tensors(args: tuple, kwargs: dict[str, Any], *, masks: bool = False) -> list[Any]:
    """Returns the tensors among the arguments of a call.

    Args:
        args, kwargs: The arguments.
        masks: bool. Also returns booleans, and arguments whose name contains "mask". In a call of
            the whole model, they may be images. Default False.
    """
    named = [value for name, value in kwargs.items() if masks or "mask" not in name]
    found = [t for t in tf.nest.flatten((args, named)) if tf.is_tensor(t)]
    if any(not isinstance(tensor, tf.Tensor) for tensor in found):
        raise NotImplementedError("ragged and sparse tensors have other operations")
    return [tensor for tensor in found if masks or tensor.dtype != tf.bool]


@contextlib.contextmanager
def _functions_are_inline() -> Iterator[None]:
    """Traces each `tf.function` as a part of the function that calls it."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)
