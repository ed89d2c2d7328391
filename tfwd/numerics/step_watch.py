"""Observation of one step's tensors: inputs and outputs of layers, and their gradients.

During the step, the watch intercepts calls of layers. The model does not change. Each output passes
through an identity whose gradient checks the backward values. For a layer that runs in a loop, in a
branch or in a separate function, only its own inputs and outputs are checked.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._graph import loss_logits
from tfwd._graph.custom_gradient import custom_gradient
from tfwd._keras import call_interception
from tfwd.current_watch import here
from tfwd.finite import can_be_non_finite
from tfwd.numerics.checked_tensors import Frame, named

# These layers only move elements of their inputs, which were checked before.
MOVING_LAYERS = (
    *("InputLayer", "Identity", "Flatten", "Reshape", "Permute", "RepeatVector", "Concatenate"),
    *(f"{kind}{n}D" for kind in ("MaxPooling", "GlobalMaxPooling", "Cropping") for n in (1, 2, 3)),
    *(f"{kind}{n}D" for kind in ("ZeroPadding", "UpSampling") for n in (1, 2, 3)),
)
# TensorFlow's kernels of these activations may turn NaN into 0. The inputs of the activations are
# therefore checked instead of the outputs. The activations keep finite elements finite.
NAN_HIDING_ACTIVATIONS = ("relu", "relu6", "leaky_relu")
_LayerCall = tuple[str, int]  # path of a layer, and number of the call


def present() -> Watch | None:
    """Returns the watch of the current thread, or `None`."""
    return getattr(here, "watch", None)


class Watch:
    """Observer of one step on one replica.

    Args:
        model: the model, whose layers are watched at any depth.
        record: function that is called with a `Frame`, its tensor and a third argument. For a
            recurrent layer that returns only its last output, the third argument is the outputs at
            all time steps. For an argument that a layer checks, it is a tensor `[2, ...]`: the
            values, and a copy with NaN in place of the wrong values. Otherwise it is `None`.
        ignores: function that returns True for frames to ignore.
        closely: bool. Also checks the outputs of layers that only move elements, and the gradients
            between Keras's layers. Without these checks a bad step is found too, because
            non-finite elements reach the next layer or the gradient of a weight. Default True.
    """

    def __init__(
        self,
        model: keras.Model,
        record: Callable[[Frame, Any, Any], None],
        closely: bool = True,
        ignores: Callable[[Frame], bool] = lambda frame: False,
    ):
        self.model, self._record, self._closely = model, record, closely
        self._ignores = ignores
        self._graph = _keras.present_graph()
        self._open: list[Any] = []  # layers whose call has not ended
        self._leaf = 0
        self._backward = 0
        self._has_loss = False  # since the last gradients were computed
        self._losses = 0  # number of gradients that were computed of losses
        self._seen: dict[int, Any] = {}
        self._given: dict[int, _LayerCall] = {}  # by id of a tensor, the call that returned it
        self._casts: dict[int, tuple[Any, _LayerCall]] = {}  # by id, a cast output and its call
        self._calls: dict[str, int] = {}  # by layer, the number of its calls
        self._followers: dict[_LayerCall, list[str]] = {}  # the layers that take an output
        self._before_users: set[str] = set()  # layers whose output a custom layer takes
        self._trained: set[_LayerCall] = set()  # calls that may depend on trainable weights
        self._data: dict[int, Any] = {}  # inputs of the model, by id
        self._layers = _keras.layers.all_layers(model)
        self._known = {id(layer) for layer in self._layers}
        self._has_users = any(
            not _keras.is_of_keras(type(x)) for x in self._layers if x is not model
        )

    @contextlib.contextmanager
    def open(self) -> Iterator[Watch]:
        """Watches the body of the `with` statement, in the current thread."""
        before = present()
        here.watch = self
        classes = {_keras.calls_of(type(layer)) for layer in self._layers}
        try:
            with (
                call_interception.intercepted(classes, self._call),
                _keras.patched(
                    [
                        (tf.GradientTape, "gradient", _backward),
                        (*_keras.layer_calls.INPUT_CAST, _cast),
                    ]
                ),
            ):
                yield self
        finally:
            here.watch = before

    def check(
        self,
        kind: str,
        name: str,
        tensor: Any,
        layer: Any = None,
        sequence: Any = None,
        call: int | None = None,
    ) -> None:
        """Checks a tensor, if its elements can be non-finite.

        Without `call`, the tensor belongs to the last call of the layer.
        """
        self._has_loss |= kind == "loss"
        if can_be_non_finite(tensor):
            self._remember(tensor)
            kind_of_layer = "" if layer is None else type(layer).__name__
            call = self._calls.get(name, 1) if call is None else call
            source = self._followers_of((name, call)) if kind == "gradient" else ()
            frame = Frame(
                kind,
                name,
                kind_of_layer,
                tensor.dtype.name,
                source,
                call,
                recurrent=_recurrent(layer) is not None,
                has_time=_has_time(layer, kind, tensor, sequence),
            )
            if not self._ignores(frame):
                self._record(frame, tensor, sequence)

    def check_argument(self, rule: str, good: Any, values: Any) -> None:
        """Records an argument that the current layer has checked; see `tfwd.finite`."""
        if not self._closely or self._leaf or self._backward or not self.is_in_watched_graph():
            return
        values = tf.cast(values, tf.float64)
        path = self._path() or self.model.name
        kind_of_layer = type([self.model, *self._open][-1]).__name__
        call = self._calls.get(path, 1)
        frame = Frame("argument", path, kind_of_layer, "float64", call=call, rule=rule)
        if not self._ignores(frame):
            checked = tf.where(good, values, tf.constant(math.nan, tf.float64))
            self._record(frame, checked, tf.stack([values, checked]))

    def _path(self) -> str:
        """Returns the path of the layer that is called now; "" in the call of the model."""
        return "/".join(layer.name for layer in self._open)

    def _followers_of(self, call: _LayerCall) -> tuple[str, ...]:
        """Returns the layers that take a call's output, without the models that contain them."""
        found = list(dict.fromkeys(self._followers.get(call, ())))
        inside = [one for one in found if any(other.startswith(f"{one}/") for other in found)]
        return tuple(one for one in found if one not in inside)

    def is_in_watched_graph(self) -> bool:
        """Returns True if a new operation would be in the watched graph."""
        return _keras.present_graph() is self._graph

    def _remember(self, tensor: Any) -> None:
        tensor = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
        self._seen[id(tensor)] = weakref.ref(tensor)

    def _is_new(self, tensor: Any) -> bool:
        reference = self._seen.get(id(tensor))
        return reference is None or reference() is not tensor

    def _call(
        self, cls: type, layer: Any, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        if layer is self.model and not self._trained:
            given = [x for x in tf.nest.flatten((args, kwargs)) if isinstance(x, tf.Tensor)]
            self._data.update((id(x), weakref.ref(x)) for x in given)
        if layer is self.model or id(layer) not in self._known:  # (as layers in a Sequential)
            return own(*args, **kwargs)
        outermost = _keras.calls_of(type(layer)) is cls
        if not outermost or self._leaf or self._backward or not self.is_in_watched_graph():
            return own(*args, **kwargs)
        self._open.append(layer)
        path = self._path()
        self._calls[path] = self._calls.get(path, 0) + 1
        # A wrapper of tfwd runs its layer in separate functions, and some functions run twice. A
        # recurrent layer runs its cell in a loop. Only eager mode would show the cell.
        leaf = isinstance(layer, _keras.layer_wrappers.NoAutographLayer) or _loops(layer)
        self._leaf += leaf
        try:
            depends = self._inputs(path, layer, args, kwargs)
            sequence = self._sequence(layer, own, args, kwargs) if self._closely else None
            hides_nan = _hides_nan(layer)
            with self._pre_activation(layer, path) if hides_nan else contextlib.nullcontext():
                outputs = own(*args, **kwargs)
        finally:
            self._leaf -= leaf
            self._open.pop()
        if depends or layer.trainable_weights:  # the call may have made them
            self._trained.add((path, self._calls[path]))
        moves = type(layer).__name__ in MOVING_LAYERS and _keras.is_of_keras(type(layer))
        look = self._closely or not (hides_nan or moves)
        return tf.nest.map_structure(
            lambda value: self._output(path, layer, value, look, sequence), outputs
        )

    def _inputs(self, path: str, layer: Any, args: tuple, kwargs: dict) -> bool:
        """Checks inputs that are not outputs of a layer. Records the source of the other inputs.

        Returns:
            True if an input may depend on trainable weights.
        """
        # Other code may compute a new input of any output, and of own weights of the open layers.
        holders = map(_keras.layers.held_weights, (self.model, *self._open[:-1]))
        may_be_trained = bool(self._trained) or any(holders)
        depends = False
        for value in tf.nest.flatten((args, kwargs)):
            if not isinstance(value, tf.Tensor):
                is_tensor = isinstance(value, (tf.RaggedTensor, tf.SparseTensor))
                depends |= may_be_trained and is_tensor
                continue
            if self._is_new(value):
                self._given.pop(id(value), None)  # the id of an earlier tensor
                reference, giver = self._casts.get(id(value), (_nothing, None))
                giver = giver if reference() is value else None
                self.check("input", path, value, layer)
            else:
                giver = self._given.get(id(value))
            if giver is not None:
                self._followers.setdefault(giver, []).append(path)
                if not _keras.is_of_keras(type(layer)):
                    self._before_users.add(giver[0])
            if giver is not None:
                depends |= giver in self._trained
            elif self._data.get(id(value), _nothing)() is not value:
                depends |= may_be_trained
        return depends

    def _sequence(self, layer: Any, own: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Returns the outputs at all time steps of a recurrent layer that returns only the last."""
        recurrent = isinstance(layer, keras.layers.RNN) and not layer.return_sequences
        draws = any(getattr(layer, name, 0) for name in ("dropout", "recurrent_dropout"))
        if not recurrent or draws or layer.stateful:  # a second call would differ
            return None
        object.__setattr__(layer, "return_sequences", True)
        self._leaf += 1  # the real call shows the inner layers
        try:
            found = tf.nest.flatten(own(*args, **kwargs))[0]
            return found if isinstance(found, tf.Tensor) else None  # of ragged inputs
        finally:
            self._leaf -= 1
            object.__setattr__(layer, "return_sequences", False)

    def _output(self, path: str, layer: Any, value: Any, look: bool, sequence: Any) -> Any:
        if (
            not isinstance(value, tf.Tensor)
            or not can_be_non_finite(value)
            or not self._is_new(value)
        ):
            return value
        if look:
            self.check("output", path, value, layer, sequence)
        call = path, self._calls[path]
        if (self._closely or self._has_users) and self._may_be_trained(call):
            value = self._with_checked_gradient(path, layer, value)
        self._remember(value)
        self._given[id(value)] = call
        return value

    def _may_be_trained(self, call: _LayerCall) -> bool:
        """Returns True if the outputs of a call may depend on trainable weights."""
        return call in self._trained

    def _note_cast(self, value: Any, cast: Any) -> None:
        """Records that a layer casts the output of another layer to its own dtype."""
        if self._data.get(id(value), _nothing)() is value:
            self._data[id(cast)] = weakref.ref(cast)
        if cast is not value and id(value) in self._given and not self._is_new(value):
            self._casts[id(cast)] = weakref.ref(cast), self._given[id(value)]

    def _with_checked_gradient(self, path: str, layer: Any, value: tf.Tensor) -> tf.Tensor:
        """Returns the tensor with its mask. Backward then checks the gradient of the tensor."""
        call = self._calls[path]

        @custom_gradient
        def tap(value: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            def backward(upstream: Any) -> Any:
                # A relu in the previous layer may hide a bad gradient of a custom layer.
                must_check = (
                    self._closely
                    or not _keras.is_of_keras(type(layer))
                    or path in self._before_users
                )
                if must_check and present() is self and self.is_in_watched_graph():
                    self.check("gradient", path, upstream, layer, call=call)
                return upstream

            return tf.identity(value), backward

        tapped, mask = loss_logits.keep(value, tap), _keras.layers.get_mask(value)
        if mask is not None:
            _keras.layers.set_mask(tapped, mask)
        return tapped

    def _before_gradient(self, target: Any) -> None:
        """Checks the loss before a tape computes gradients. A custom step may compute the loss."""
        if self._has_loss or self._open or not self.is_in_watched_graph():
            return
        word = f"loss {self._losses + 1}" if self._losses else "loss"
        scalars = [
            (name, one)
            for name, one in named(word, target)
            if isinstance(one, tf.Tensor) and one.shape.rank == 0
        ]
        self._losses += bool(scalars)
        for name, loss in scalars:
            self.check("loss", name, loss)

    def _after_gradient(self, sources: Any, found: Any) -> None:
        """Expects a new loss, after a tape has computed gradients."""
        self._has_loss = False

    @contextlib.contextmanager
    def _pre_activation(self, layer: Any, path: str) -> Iterator[None]:
        own = layer.activation

        def activation(values: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_in_watched_graph() and self._is_new(values):
                self.check("pre-activation", path, values, layer)
            return own(values, *args, **kwargs)

        previous = vars(layer).get("activation")
        object.__setattr__(layer, "activation", activation)
        try:
            yield
        finally:
            if previous is None:
                object.__delattr__(layer, "activation")
            else:
                object.__setattr__(layer, "activation", previous)


def _loops(layer: Any) -> bool:
    return isinstance(layer, keras.layers.RNN) and not getattr(layer, "unroll", False)


def _recurrent(layer: Any) -> Any:
    """Returns a recurrent layer, or the forward layer of a Bidirectional; None for other layers."""
    inner = getattr(layer, "forward_layer", layer)
    return inner if isinstance(inner, keras.layers.RNN) else None


def _has_time(layer: Any, kind: str, tensor: Any, sequence: Any) -> bool:
    """Returns True if the second axis of a tensor, or of the outputs at all steps, is time."""
    recurrent = _recurrent(layer)
    if recurrent is None or getattr(recurrent, "time_major", False):
        return False
    if kind == "output":
        returns = recurrent.return_sequences or sequence is not None
        return returns and (sequence is not None or (tensor.shape.rank or 0) > 2)
    return kind in ("input", "pre-activation")


def _hides_nan(layer: Any) -> bool:
    # The activation of a recurrent layer belongs to its cell, which is another layer.
    name = getattr(vars(layer).get("activation"), "__name__", "")
    return name in NAN_HIDING_ACTIVATIONS and _keras.is_of_keras(type(layer))


def _nothing() -> None:
    """Stands for a weak reference to no object."""


def _cast(own: Callable[..., Any]) -> Callable[..., Any]:
    def cast(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        result, watch = own(self, value, *args, **kwargs), present()
        if watch is not None and tf.is_tensor(value):
            watch._note_cast(value, result)
        return result

    return cast


def _backward(own: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        watch = present()
        if watch is None:
            return own(tape, target, sources, *args, **kwargs)
        watch._before_gradient(target)
        watch._backward += 1  # layers that run again in backward were checked in forward
        try:
            found = own(tape, target, sources, *args, **kwargs)
        finally:
            watch._backward -= 1
        watch._after_gradient(sources, found)
        return found

    return gradient
