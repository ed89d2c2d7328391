"""Looks at the tensors of one step: what goes into layers, what comes out, and its gradients.

For the time of the step, calls of layers are intercepted, so that the model stays as it is. Each
output goes through an identity whose gradient looks at what comes back. A layer in a loop, in a
branch or in a function of its own is not looked into: its own inputs and outputs are.
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
from tfwd._graph.custom_gradient import custom_gradient
from tfwd._keras import calls
from tfwd.finite import can_be_non_finite, here
from tfwd.numerics.frames import Frame

# What comes out of these is what goes in, which was looked at before.
MOVES = (
    *("InputLayer", "Identity", "Flatten", "Reshape", "Permute", "RepeatVector", "Concatenate"),
    *(f"{kind}{n}D" for kind in ("MaxPooling", "GlobalMaxPooling", "Cropping") for n in (1, 2, 3)),
    *(f"{kind}{n}D" for kind in ("ZeroPadding", "UpSampling") for n in (1, 2, 3)),
)
# TensorFlow's kernels of these may turn NaN into 0, so what goes into them is looked at instead of
# what comes out. They keep what is finite.
SWALLOWING = ("relu", "relu6", "leaky_relu")


def present() -> Watch | None:
    """The watch of the present thread, if there is one."""
    return getattr(here, "watch", None)


class Watch:
    """What is seen in one step on one replica.

    Args:
        model: its layers are watched, and those in them.
        record: called with a `Frame` and the tensor for each that is to be looked at; with a third
            argument, of a recurrent layer that gives its last output alone: its outputs at all
            time steps, `None` where they are not known. Of a layer's argument: its values, and the
            same with NaN for the wrong ones.
        ignores: whether a frame is not to be looked at.
        closely: also what can only be finite if what is looked at otherwise is: what layers that
            move elements give, and the gradients between layers of Keras. These pass on what is not
            finite, until it is in the gradient of a weight.
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
        self._path: list[str] = []
        self._kinds_of_layers: list[str] = []
        self._leaf = 0
        self._backward = 0
        self._has_loss = False  # since gradients were made last
        self._seen: dict[int, Any] = {}
        self._given: dict[int, str] = {}  # by a tensor, the layer whose output it is
        self._calls: dict[str, int] = {}  # by a layer, how many there were
        self.followers: dict[str, list[str]] = {}  # by a layer, those that take its output
        self._before_users: set[str] = set()  # layers whose output a user's layer takes
        self._layers = _keras.layers.all_layers(model)
        self._known = {id(layer) for layer in self._layers}
        self._has_users = any(not _is_of_keras(x) for x in self._layers if x is not model)

    @contextlib.contextmanager
    def open(self) -> Iterator[Watch]:
        """Watches, in the present thread, what the body does."""
        before = present()
        here.watch = self
        classes = {calls.calls_of(type(layer)) for layer in self._layers}
        try:
            with (
                calls.intercepted(classes, self._call),
                _keras.patched([(tf.GradientTape, "gradient", _backward)]),
            ):
                yield self
        finally:
            here.watch = before

    def look(
        self,
        kind: str,
        name: str,
        tensor: Any,
        layer: Any = None,
        sequence: Any = None,
        call: int | None = None,
    ) -> None:
        """Looks at a tensor, if its elements can be other than finite.

        Without its number, the call of a layer is the last.
        """
        self._has_loss |= kind == "loss"
        if can_be_non_finite(tensor):
            self._remember(tensor)
            kind_of_layer = "" if layer is None else type(layer).__name__
            source = self._followers_of(name) if kind == "gradient" else ()
            call = self._calls.get(name, 1) if call is None else call
            frame = Frame(kind, name, kind_of_layer, tensor.dtype.name, source, call)
            if not self._ignores(frame):
                self._record(frame, tensor, sequence)

    def look_at_argument(self, rule: str, good: Any, values: Any) -> None:
        """Looks closely at an argument that the present layer has checked; see `tfwd.finite`."""
        if not self._closely or self._leaf or self._backward or not self.looks_here():
            return
        values = tf.cast(values, tf.float64)
        path = "/".join(self._path) or self.model.name
        kind_of_layer = [type(self.model).__name__, *self._kinds_of_layers][-1]
        call = self._calls.get(path, 1)
        frame = Frame("argument", path, kind_of_layer, "float64", call=call, rule=rule)
        if not self._ignores(frame):
            checked = tf.where(good, values, tf.constant(math.nan, tf.float64))
            self._record(frame, checked, tf.stack([values, checked]))

    def _followers_of(self, path: str) -> tuple[str, ...]:
        """The layers that take a layer's output, but not the models that these are in."""
        found = list(dict.fromkeys(self.followers.get(path, ())))
        inside = [one for one in found if any(other.startswith(f"{one}/") for other in found)]
        return tuple(one for one in found if one not in inside)

    def looks_here(self) -> bool:
        """Whether operations are now added where they can be looked at."""
        return _keras.present_graph() is self._graph

    def _remember(self, tensor: Any) -> None:
        tensor = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
        self._seen[id(tensor)] = weakref.ref(tensor)

    def _is_new(self, tensor: Any) -> bool:
        held = self._seen.get(id(tensor))
        return held is None or held() is not tensor

    def _call(
        self, cls: type, layer: Any, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        outermost = calls.calls_of(type(layer)) is cls
        if not outermost or self._leaf or self._backward or not self.looks_here():
            return own(*args, **kwargs)
        if layer is self.model or id(layer) not in self._known:  # (as what is in a Sequential)
            return own(*args, **kwargs)
        self._path.append(layer.name)
        self._kinds_of_layers.append(type(layer).__name__)
        path = "/".join(self._path)
        self._calls[path] = self._calls.get(path, 0) + 1
        # A wrapper of tfwd's runs its layer by functions of its own, some of them twice.
        leaf = isinstance(layer, _keras.layers.NoAutographLayer)
        self._leaf += leaf
        try:
            self._inputs(path, layer, args, kwargs)
            sequence = self._sequence(layer, own, args, kwargs) if self._closely else None
            swallows = _is_swallowing(layer)
            with self._pre_activation(layer, path) if swallows else contextlib.nullcontext():
                outputs = own(*args, **kwargs)
        finally:
            self._leaf -= leaf
            self._path.pop()
            self._kinds_of_layers.pop()
        moves = type(layer).__name__ in MOVES and _is_of_keras(layer)
        look = self._closely or not (swallows or moves)
        return tf.nest.map_structure(
            lambda value: self._output(path, layer, value, look, sequence), outputs
        )

    def _inputs(self, path: str, layer: Any, args: tuple, kwargs: dict) -> None:
        """Looks at inputs that no layer gave, and notes whose output the others are."""
        for value in tf.nest.flatten((args, kwargs)):
            if not isinstance(value, tf.Tensor):
                continue
            if self._is_new(value):
                self.look("input", path, value, layer)
            elif id(value) in self._given:
                given = self._given[id(value)]
                self.followers.setdefault(given, []).append(path)
                if not _is_of_keras(layer):
                    self._before_users.add(given)

    def _sequence(self, layer: Any, own: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """The outputs at all time steps of a recurrent layer that gives the last alone."""
        recurrent = isinstance(layer, keras.layers.RNN) and not layer.return_sequences
        draws = any(getattr(layer, name, 0) for name in ("dropout", "recurrent_dropout"))
        if not recurrent or draws or layer.stateful:  # a second call would not be the same
            return None
        object.__setattr__(layer, "return_sequences", True)
        self._leaf += 1  # what is in it is seen in the call itself
        try:
            return tf.nest.flatten(own(*args, **kwargs))[0]
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
            self.look("output", path, value, layer, sequence)
        if self._closely or self._has_users:
            value = self._tapped(path, layer, value)
        self._remember(value)
        self._given[id(value)] = path
        return value

    def _tapped(self, path: str, layer: Any, value: tf.Tensor) -> tf.Tensor:
        """The tensor with its mask, whose gradient is looked at."""
        call = self._calls[path]

        @custom_gradient
        def tap(value: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            def backward(upstream: Any) -> Any:
                # What a user's layer gives back may be lost in the layer before, behind a relu.
                wanted = self._closely or not _is_of_keras(layer) or path in self._before_users
                if wanted and present() is self and self.looks_here():
                    self.look("gradient", path, upstream, layer, call=call)
                return upstream

            return tf.identity(value), backward

        tapped, mask = tap(value), _keras.layers.get_mask(value)
        if mask is not None:
            _keras.layers.set_mask(tapped, mask)
        return tapped

    def _before_gradient(self, target: Any) -> None:
        """A tape is asked for gradients: of a loss, which the user's own step may have computed."""
        for one in tf.nest.flatten(target):
            is_loss = isinstance(one, tf.Tensor) and one.shape.rank == 0
            if is_loss and not self._has_loss and not self._path and self.looks_here():
                self.look("loss", "loss", one)

    def _after_gradient(self, sources: Any, found: Any) -> None:
        """A tape has made them."""
        self._has_loss = False

    @contextlib.contextmanager
    def _pre_activation(self, layer: Any, path: str) -> Iterator[None]:
        own = layer.activation

        def activation(values: Any, *args: Any, **kwargs: Any) -> Any:
            if self.looks_here() and self._is_new(values):
                self.look("pre-activation", path, values, layer)
            return own(values, *args, **kwargs)

        held = vars(layer).get("activation")
        object.__setattr__(layer, "activation", activation)
        try:
            yield
        finally:
            if held is None:
                object.__delattr__(layer, "activation")
            else:
                object.__setattr__(layer, "activation", held)


def _is_of_keras(layer: Any) -> bool:
    return type(layer).__module__.startswith("keras.")


def _is_swallowing(layer: Any) -> bool:
    # (That of a recurrent layer is its cell's, which is a layer itself.)
    name = getattr(vars(layer).get("activation"), "__name__", "")
    return name in SWALLOWING and _is_of_keras(layer)


def _backward(own: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        watch = present()
        if watch is None:
            return own(tape, target, sources, *args, **kwargs)
        watch._before_gradient(target)
        watch._backward += 1  # layers that are run a second time were seen before
        try:
            found = own(tape, target, sources, *args, **kwargs)
        finally:
            watch._backward -= 1
        watch._after_gradient(sources, found)
        return found

    return gradient
