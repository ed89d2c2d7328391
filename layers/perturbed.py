"""How a layer runs on effective weights: what stands behind every layer here that perturbs weights.

A training call takes a call number, computes each parametrized weight's effective value from its
raw value and a seed, and runs the layer with those values in place of the variables. Around that,
`tfwd.recompute` keeps nothing but the arguments for backward. Where that takes a second run of the
layer, in eager mode or under a training flag that is a tensor, only a layer that is known to
compute the same again is run so (see `call_analysis`, `provable`); another one keeps its effective
weights instead.

Nested wrappers are one chain, the inner first. For the time of its call an outer wrapper leaves a
note of what it does to which weights (an `OuterWrapper`); an inner one on the same weight
starts from the raw value and applies the outer ones' links after its own.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _graphs, _keras, parametrizations, rates, recompute, substitute, training_flag
from tfwd.layers import call_analysis, lookup, packing, provable, reads
from tfwd.layers.attributes import Attributes
from tfwd.layers.seed_stream import SeedStream
from tfwd.layers.weight_selection import Target
from tfwd.parametrizations import BoundParametrization, Parametrization

TargetedWeights = list[tuple[Target, Parametrization]]


class OuterWrapper(NamedTuple):
    """What one wrapper around the present call does, by the variables' ids."""

    raw: dict[int, tf.Tensor]
    links: dict[int, BoundParametrization]
    taken: dict[int, keras.Variable]  # whose raw value a wrapper inside has asked for


_local = threading.local()


def _frames() -> list[OuterWrapper]:
    return getattr(_local, "frames", [])


@contextlib.contextmanager
def _within(frames: list[OuterWrapper]) -> Iterator[None]:
    before = _frames()
    _local.frames = frames
    try:
        yield
    finally:
        _local.frames = before


class Perturber:
    """Runs calls of one layer on effective weights.

    Args:
        name: the name of the layer that owns this, for messages.
        draws: the state of its draws.

    Attributes:
        chosen: the parametrized weights, each with its parametrization.
        chosen_from: the ids of the weights that they were chosen from, by which it shows when a
            layer has got new ones.
        made_for: the training flags, None for a tensor, for whose calls the layer is known to have
            made all its weights.
    """

    def __init__(self, name: str, draws: SeedStream) -> None:
        self.name = name
        self.draws = draws
        self.chosen: TargetedWeights = []
        self.chosen_from: tuple[int, ...] | None = None
        self.made_for: set[bool | None] = set()
        self._verdicts: dict[Any, call_analysis.CallAnalysis] = {}

    def run(
        self,
        owner: keras.Layer,
        function: Callable[..., Any],
        variables: list[keras.Variable],
        chosen: TargetedWeights,
        args: tuple,
        kwargs: Mapping[str, Any],
        training: bool | tf.Tensor,
        recomputed: bool,
    ) -> Any:
        """Returns `function(*args, training=training, **kwargs)` on effective weights.

        Args:
            owner: the layer whose call this is, which takes over the losses.
            function: the call of the layer whose weights are parametrized.
            variables: all variables that it may read.
            chosen: the parametrized weights among them, each with its parametrization.
            args, kwargs: the arguments, tensors in any nest.
            training: the training flag.
            recomputed: whether backward computes the effective weights again.
        """
        chosen = [(t, p) for t, p in chosen if not p.is_identity and acts(p, training)]
        if not chosen and isinstance(training, bool):
            return self.run_plain(function, args, kwargs, training)
        call = SubstitutedCall(
            self.name, self.draws, function, variables, chosen, args, kwargs, training
        )
        # Layers that are frozen or set free behave otherwise from then on.
        key = (*call.key(), tuple(layer.trainable for layer in _keras.layers.all_layers(owner)))
        verdict = self._verdicts.get(key)
        names = {id(target.variable): target.name for target, _ in call.chosen}
        if verdict is None:
            verdict = call_analysis.inspect(self.name, owner, names, call)
        call.extend(verdict.extra)
        warned = recomputed and bool(chosen) and bool(verdict.impure)
        recomputed = recomputed and bool(chosen) and not _graphs.is_saving()
        again = recomputed and call.runs_again()
        if again:
            recomputed = again = not verdict.taken and provable.is_keras_own(owner)
        before = Attributes(owner) if again else None
        watch = contextlib.nullcontext() if verdict.seen else _graphs.Accesses()
        with watch as accesses, reads.kept_tensors_explained(self.name):
            result = call.run(verdict, recomputed, before)
        if accesses is not None:
            reads.check(self.name, names, filter(accesses.has, call.variables), reads.PAST_KERAS)
        if key not in self._verdicts:
            self._verdicts[key] = verdict
            if warned:
                warnings.warn(
                    f"layer '{self.name}' cannot be run a second time in backward, because "
                    f"{verdict.impure}; it keeps its effective weights until then, as with "
                    "recompute=False",
                    stacklevel=2,
                )
        for loss in result.losses:
            _keras.layers.add_loss(owner, loss)
        substitute.assign(result.updates)
        return result.outputs

    def look_up(
        self,
        layer: keras.layers.Embedding,
        chosen: TargetedWeights,
        ids: Any,
        training: bool | tf.Tensor,
    ) -> tf.Tensor:
        """The same for a lookup in a table of which only some rows need be computed."""
        chosen = [(t, p) for t, p in chosen if not p.is_identity]
        call = SubstitutedCall(
            self.name, self.draws, layer, layer.weights, chosen, (), {}, training
        )
        return lookup.rows(call, layer, ids)

    def run_plain(
        self,
        function: Callable[..., Any],
        args: tuple,
        kwargs: Mapping[str, Any],
        training: bool | tf.Tensor,
    ) -> Any:
        """The same on the weights as they are."""
        with _keras.layers.CallState().restored(training):
            return function(*args, training=training, **kwargs)


def acts(parametrization: Parametrization, training: bool | tf.Tensor) -> bool:
    """Whether a parametrization may do anything under this flag."""
    if training is False:
        return any(not element.stochastic for element in parametrization.elements())
    return True


class SubstitutedCall:
    """One call, taken apart into tensors and seeds, so that it can be made again from them."""

    def __init__(
        self,
        name: str,
        draws: SeedStream,
        function: Callable[..., Any],
        variables: list[keras.Variable],
        chosen: TargetedWeights,
        args: tuple,
        kwargs: Mapping[str, Any],
        training: bool | tf.Tensor,
    ) -> None:
        self.name = name
        self.function = function
        self.training = training
        self.variables = list(variables)
        self.frames = _frames()
        self._state = _keras.layers.CallState()
        self._arguments = packing.Arguments(args, dict(kwargs))
        if training is False or not chosen:
            root = number = tf.zeros([], tf.int64)
        else:
            root, number = draws.next(training)
        self.chosen = []
        for target, parametrization in chosen:
            with rates.naming(f"weight '{target.name}' of layer '{name}'"):
                self.chosen.append((target, parametrization.at(number)))
        self.seeds = [draws.seed_of(root, number, target.position) for target, _ in chosen]
        # Weights that only wrappers around this one parametrize are read as those left them; but a
        # wrapper inside this one may still ask for their raw values.
        ids = {id(target.variable) for target, _ in chosen}
        self._carried = [v for v in variables if id(v) not in ids and self._frame_of(v)]
        self.tensors = [
            *self._arguments.tensors,
            *(self.raw(v) for v in self._carried),
            *(self.raw(v) if id(v) in ids else _keras.variables.value(v) for v in variables),
        ]

    def extend(self, variables: list[keras.Variable]) -> None:
        """Adds variables that the layer reads and does not list, such as states of an RNN."""
        known = {id(v) for v in self.variables}
        variables = [v for v in variables if id(v) not in known]
        self.variables += variables
        self.tensors += [_keras.variables.value(v) for v in variables]

    def key(self) -> tuple:
        """What the verdict on this call depends on."""
        weights = tuple(id(v) for v in self.variables)
        flag = self.training if isinstance(self.training, bool) else None
        return self._arguments.kind(), weights, flag, tf.executing_eagerly(), len(self.frames)

    def signature(self) -> tuple:
        """The same without this layer's own weights: what a call of an equal layer has too."""
        kinds = tuple((target.position, repr(p)) for target, p in self.chosen)
        shapes = tuple((str(v.dtype), tuple(v.shape)) for v in self.variables)
        flag = self.training if isinstance(self.training, bool) else None
        return self._arguments.kind(), kinds, shapes, flag, tf.executing_eagerly()

    def runs_again(self) -> bool:
        """Whether backward would have to run the layer a second time."""
        return tf.executing_eagerly() or not isinstance(self.training, bool)

    def run(
        self, verdict: call_analysis.CallAnalysis, recomputed: bool, before: Attributes | None
    ) -> substitute.Result:
        """Makes the call. Captured updates are returned and not made.

        Args:
            verdict: what the call is known to do.
            recomputed: whether backward computes the effective weights again.
            before: what the layers are while they run, given if they may run a second time.
        """
        branches = None if isinstance(self.training, bool) else verdict
        packed = packing.Results(self.name, self._arguments, branches)
        pure = not verdict.impure
        capture = pure and (recomputed or not isinstance(self.training, bool))

        def function(training: bool, tensors: list, seeds: list, weights: list) -> list[tf.Tensor]:
            # A user may have changed the layer since it ran.
            with contextlib.nullcontext() if before is None else before.restored():
                return packed.pack(self.evaluate(training, tensors, seeds, weights, capture))

        def keeping(training: bool) -> list[tf.Tensor]:
            weights = self.weights(training, self.tensors, self.seeds)
            return function(training, self.tensors, self.seeds, weights)

        if pure and recomputed:
            flat = recompute.call(self.weights, function, self.training, self.tensors, self.seeds)
        else:
            flat = training_flag.each(self.training, keeping)
        return packed.unpack(list(flat))

    def weights(self, training: bool, tensors: list, seeds: list) -> list[tf.Tensor]:
        """The effective values of the parametrized weights, from raw values and seeds."""
        values = self._values(tensors)
        return [
            parametrizations.apply(values[id(target.variable)], chain)
            for (target, _), chain in zip(self.chosen, self.chains(training, seeds), strict=True)
        ]

    def chains(self, training: bool, seeds: list) -> list[list[BoundParametrization]]:
        """What is done to each of the parametrized weights, here and by wrappers around."""
        chains = []
        for (target, p), seed in zip(self.chosen, seeds, strict=True):
            key = id(target.variable)
            around = [f.links[key] for f in reversed(self.frames) if key in f.links]
            chains.append([BoundParametrization(p, seed, training), *around])
        return chains

    def _values(self, tensors: list) -> dict[int, tf.Tensor]:
        after = len(self._arguments.tensors) + len(self._carried)
        return {id(v): t for v, t in zip(self.variables, tensors[after:], strict=True)}

    def evaluate(
        self, training: bool, tensors: list, seeds: list, weights: list, capture: bool
    ) -> substitute.Result:
        """Calls the layer on effective weights."""
        inputs = len(self._arguments.tensors)
        args, kwargs = self._arguments.rebuild(tensors[:inputs])
        raw = {id(v): t for v, t in zip(self._carried, tensors[inputs:], strict=False)}
        values = self._values(tensors)
        links = {}
        for (target, p), seed, weight in zip(self.chosen, seeds, weights, strict=True):
            key = id(target.variable)
            links[key] = BoundParametrization(p, seed, training)
            raw[key], values[key] = values[key], weight
        frame = OuterWrapper(raw, links, {})
        # Without capture the other variables are left as they are, to be updated in place.
        given = [(v, values[id(v)]) for v in self.variables if capture or id(v) in links]
        with _within([*self.frames, frame]), self._state.restored(training):
            result = substitute.call(
                lambda: self.function(*args, training=training, **kwargs), given, capture
            )
        return result._replace(read=result.read | frame.taken)

    def _frame_of(self, variable: keras.Variable) -> OuterWrapper | None:
        return next((f for f in reversed(self.frames) if id(variable) in f.raw), None)

    def raw(self, variable: keras.Variable) -> tf.Tensor:
        """The value of a weight that no wrapper has touched."""
        frame = self._frame_of(variable)
        if frame is None:
            return _keras.variables.value(variable)
        frame.taken[id(variable)] = variable
        return frame.raw[id(variable)]
