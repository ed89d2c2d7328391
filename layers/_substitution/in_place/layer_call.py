"""`Link`: runs the call of one layer on the effective weights of an `InPlace`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras, training_flag
from tfwd._graph import private_graph_apis
from tfwd.layers._substitution import (
    caller_detection,
    method_hooks,
    per_example_call,
    recurrent_call,
    unsupported_weight_reads,
)
from tfwd.layers._substitution.in_place import draw_replay, running_calls
from tfwd.layers._substitution.in_place.parametrization_in_place import InPlace
from tfwd.layers._substitution.weight_perturbation_mixin import WeightPerturbationMixin, _CallCache
from tfwd.layers._substitution.weight_selection import Parametrizations, TargetedWeights


class Link(WeightPerturbationMixin):
    """The part of an `InPlace` that runs in the call of one layer.

    Args:
        owner: The `InPlace`.
        layer: Hooked layer.
        inside: Weights of the `InPlace` that the layer has or contains.
        targeted: Weights that the layer substitutes. Empty for a container.

    Attributes:
        inside: dict from a variable's id to the weight of `inside`.
        targeted_here: Weights that the layer substitutes.
    """

    def __init__(
        self,
        owner: InPlace,
        layer: keras.Layer,
        inside: TargetedWeights,
        targeted: TargetedWeights,
    ) -> None:
        self.in_place = owner
        self.layer = layer
        self.name = layer.name
        self.parametrizations = {target.path: p for target, p in targeted}
        self.references = owner.references
        self.addition_number = owner.addition_number
        self.draws: Any = _PresentDraws(owner)
        self._call_cache = _CallCache()
        self.inside = {id(pair[0].variable): pair for pair in inside}
        self.targeted_here = targeted
        self.substituted = frozenset(id(target.variable) for target, _ in targeted)
        if targeted:
            names = {id(target.variable): target.name for target, _ in targeted}
            unsupported_weight_reads.check_normalized(layer, names)
            per_example_call.check(layer, targeted)

    @property
    def is_effective(self) -> bool:
        """True if the layer runs on effective weights. False for a container."""
        return bool(self.targeted_here)

    @property
    def calls(self) -> int | tf.Tensor:
        """Number of the running call."""
        number = tf.raw_ops.Unpack(value=running_calls.by_owner()[self.in_place].state, num=2)[1]
        return int(number) if tf.executing_eagerly() else number

    def effective_weights(
        self, call: int | tf.Tensor, examples: int | None = None
    ) -> dict[str, tf.Tensor]:
        """Returns the weights that this layer substitutes in a training call."""
        return self.in_place.effective_of(self.targeted_here, call, examples)

    def _all_parametrizations(self) -> list[Parametrizations]:
        others = [{t.path: p for t, p in one.targeted} for one in around(self.layer)]
        return [*super()._all_parametrizations(), *others]

    @property
    def recompute(self) -> bool:  # type: ignore[override]
        """True if no effective weight is stored for backward."""
        return self.in_place.recompute

    def _subject(self) -> keras.Layer:
        return self.layer

    def _owner(self) -> keras.Layer:
        return self.layer

    def _calls_subject(self) -> bool:
        return method_hooks.is_first_link(self.layer, self)

    def _targeted(self) -> TargetedWeights:
        self._call_cache.targeted_from = ()
        return self.targeted_here

    def _begun_references(self, training: bool | tf.Tensor) -> list[tf.Variable]:
        held = super()._begun_references(training)
        own = [v for pair in self.targeted_here for v in self.in_place.references_of(*pair)]
        return [*held, *own]

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the layer, on effective weights in training.

        Args:
            function: The previous link, or the layer's own call.
            *args: Positional arguments of the layer's `call`.
            **kwargs: Keyword arguments of the layer's `call`.
        """
        owner = self.in_place
        training, names, values = _keras.layer_calls.split_training(self.layer, args, kwargs)
        flag = training_flag.standardize(training)
        step = caller_detection.present_step()
        if training is None and step is not None:
            flag, function = True, functools.partial(_in_training, function)
        acting = True if caller_detection.is_sampling() else flag
        is_raw = acting is False and owner.is_stochastic
        if (
            is_raw
            or (private_graph_apis.is_saving() and acting is not False)
            or _keras.layer_calls.is_symbolic()
        ):
            return self._passed_on(owner, flag, function, args, kwargs)
        present = running_calls.by_owner().get(owner)
        if present is not None and present.state is None:
            return function(*args, **kwargs)
        if present is not None:
            return self._run(present, flag, function, names, values)
        self._make_weights(flag, args, kwargs)
        if step is not None and acting is not False:
            step.has_trained = True
        present = owner.begin(self.layer, acting)
        with owner.effective_reads(self.layer):
            return self._run(present, flag, function, names, values)

    def _make_weights(self, flag: bool | tf.Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """Lets the layer create the weights that a call of this kind uses, outside all scopes."""
        key = flag if isinstance(flag, bool) else None
        made_for = self._call_cache.made_for
        if key not in made_for and _keras.layer_building.awaits_call(self.layer):
            made_for.add(key)
            with running_calls.using_calls(
                {**running_calls.by_owner(), self.in_place: running_calls.NO_CALL}
            ):
                _keras.layer_building.build_by_call(self.layer, args, kwargs)
        made_for.add(key)

    def _begun_inside(self, training: bool | tf.Tensor) -> dict[InPlace, running_calls.RunningCall]:
        """Takes call numbers for parametrizations of layers inside, before the call is traced."""
        present = {*running_calls.by_owner(), self.in_place}
        layers = _keras.layers.all_layers(self.layer)[1:]
        owners = [one for inner in layers for one in around(inner) if one not in present]
        return {one: one.begin(one.target, training) for one in dict.fromkeys(owners)}

    def _passed_on(
        self,
        owner: InPlace,
        flag: bool | tf.Tensor,
        function: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        calls = running_calls.by_owner()
        if owner in calls:
            calls = {**calls, owner: calls[owner]._replace(training=flag)}
        with running_calls.using_calls(calls):
            return function(*args, **kwargs)

    def _run(
        self,
        present: running_calls.RunningCall,
        flag: bool | tf.Tensor,
        function: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls the layer within the running call.

        Args:
            present: Present call of the parametrizations.
            flag: Training flag of the layer.
            function: The previous link, or the layer's own call.
            args: Positional arguments.
            kwargs: Keyword arguments, without the training flag.
        """
        outer = running_calls.by_owner()
        covered = present.covered | self.substituted
        acting = True if caller_detection.is_sampling() else flag
        layer = self.layer
        begun = {} if self.substituted <= present.covered else self._begun_inside(acting)
        own = present._replace(training=acting, covered=covered)
        inner = {**outer, self.in_place: own, **begun}
        accepts = _keras.layer_calls.accepts_training(layer)

        def plain(*args: Any, training: Any, **kwargs: Any) -> Any:
            if accepts:
                kwargs["training"] = training
            return function(*args, **kwargs)

        # Backward may call it again, after the outermost call has ended.
        def within(used: Callable[..., Any], *args: Any, training: Any, **kwargs: Any) -> Any:
            sampled = caller_detection.is_sampling()
            now = inner[self.in_place]._replace(training=True if sampled else training)
            with running_calls.using_calls({**inner, self.in_place: now}):
                return used(*args, training=training, **kwargs)

        call = functools.partial(within, plain)
        if self.substituted <= present.covered:
            return call(*args, training=flag, **kwargs)
        replay = draw_replay.current_replay()
        if replay is not None and flag is True:
            with running_calls.using_calls(self._preparing(inner)):
                return replay.call(self, functools.partial(call, *args, **kwargs, training=True))
        used = call
        if self._calls_subject() and recurrent_call.is_plain(layer):
            fast = functools.partial(recurrent_call.fast_or_plain_call, layer, plain)
            used = functools.partial(within, fast)
        elif self._calls_subject() and per_example_call.is_product(layer):
            product = functools.partial(per_example_call.call, layer, plain)
            used = call = functools.partial(within, product)
        if acting is not False:
            per_example_call.check_inputs(self, self.parametrizations, args, kwargs)
        with running_calls.using_calls(self._preparing(inner)):
            return self._perturbed_call(used, args, kwargs, flag, call)

    def _preparing(
        self, calls: dict[InPlace, running_calls.RunningCall]
    ) -> dict[InPlace, running_calls.RunningCall]:
        """Returns the running calls for reads before the layer's call. Such reads need raw values.

        Each link of the layer computes its own weights in the call.
        """
        own = self.substituted.union(*(link.substituted for link in _links(self.layer)))
        return {one: now._replace(covered=now.covered | own) for one, now in calls.items()}


class _PresentDraws:
    """The draws of the running call, in place of a layer's own `SeedStream`."""

    def __init__(self, owner: InPlace) -> None:
        self._owner = owner

    @property
    def state(self) -> keras.Variable:
        return self._owner.draws.state

    @property
    def calls(self) -> int | tf.Tensor:
        return self._owner.calls

    @property
    def share_across_replicas(self) -> bool:
        return self._owner.draws.share_across_replicas

    def next(self, training: bool | tf.Tensor = True) -> tf.Tensor:
        """Returns the number of the running call. The outermost layer has counted the call."""
        return running_calls.by_owner()[self._owner].state

    def seeds_from_state(self, state: tf.Tensor, positions: list[int]) -> list[tf.Tensor]:
        """Returns the seeds of the weights at some positions."""
        present = running_calls.by_owner()[self._owner].seeds
        return [present[position] for position in positions]


def _in_training(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a layer with the training flag of Keras set for the layers inside it."""
    with _keras.layer_calls.CallState().restored(True):
        return function(*args, **kwargs)


def around(layer: keras.Layer) -> list[InPlace]:
    """Returns the parametrizations that hook a layer."""
    return [link.in_place for link in _links(layer)]


def _links(layer: keras.Layer) -> list[Link]:
    hook = method_hooks.hook_of(layer)
    return [] if hook is None else hook.links


def links_of(owner: InPlace) -> list[Link]:
    """Returns the links of an `InPlace`, one for each layer that it hooks."""
    links = []
    for layer in distinct_layers(owner.target):
        inside = [owner.by_id[id(v)] for v in layer.weights if id(v) in owner.by_id]
        if inside:
            links.append(Link(owner, layer, inside, _substituted(layer, inside)))
    return links


def _substituted(layer: keras.Layer, inside: TargetedWeights) -> TargetedWeights:
    """Returns the weights that a layer substitutes, of the weights that it has or contains."""
    own = {id(v) for v in _keras.layers.held_weights(layer)}
    if isinstance(layer, (keras.layers.RNN, keras.layers.Wrapper)):
        return inside
    if any(id(target.variable) in own for target, _ in inside):
        return inside
    return _shared(inside, frozenset().union(*(link.substituted for link in _links(layer))))


def _shared(inside: TargetedWeights, substituted: frozenset[int]) -> TargetedWeights:
    """Returns the weights that a layer must substitute because another link substitutes them.

    The layer may read a weight of a layer inside it. The value must have all parametrizations.
    """
    return [
        (target, parametrization)
        for target, parametrization in inside
        if id(target.variable) in substituted
        and not any(element.per_example for element in parametrization.elements())
    ]


def links_that_share(link: Link) -> list[tuple[Link, Link]]:
    """Returns the links of a layer that must substitute more weights because of a new link.

    Returns:
        Pairs of such a link and the link that replaces it.
    """
    found = []
    for other in _links(link.layer):
        inside, more = list(other.inside.values()), link.substituted - other.substituted
        if more and (shared := _shared(inside, more)):
            targeted = [*other.targeted_here, *shared]
            found.append((other, Link(other.in_place, link.layer, inside, targeted)))
    return found


def distinct_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns a layer and the layers in it, each once."""
    return list({id(inner): inner for inner in _keras.layers.all_layers(layer)}.values())
