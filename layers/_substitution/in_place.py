"""`InPlace`: parametrizations of a layer's weights that leave the layer itself in place.

Each layer that has or contains a parametrized weight gets a hook (`hooks`) in place of its `call`.
In training, the outermost hooked layer takes a call number. All weights of this call use this
number, whichever layer reads them and however often. So a layer that a loop calls at each time step
has one mask for all time steps.

There are two kinds of hooked layers:

- An effective layer runs on effective weights, like the layer in a `Parametrized` wrapper. It is a
  layer that has a parametrized weight of its own, a recurrent layer, or a wrapper of Keras. Only
  this layer's weights are computed for its call, and only they are computed again in backward.
- A container only passes the call number on. It may read a weight of a layer inside it without
  calling that layer, for example a table for tied logits. Such a read returns the effective weight.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from tfwd import _keras, training_flag
from tfwd._graph import graphs
from tfwd.layers._substitution import (
    hooks,
    per_example_call,
    reads,
    recomputed_calls,
    recurrent_call,
    sampled_calls,
    training_steps,
    weight_patterns,
)
from tfwd.layers._substitution.references import References
from tfwd.layers._substitution.seed_stream import SeedStream, checked_seed
from tfwd.layers._substitution.weight_perturbation import (
    WeightPerturbationMixin,
    _CallCache,
    owned_parametrizations,
)
from tfwd.layers._substitution.weight_selection import Parametrizations, Target, TargetedWeights
from tfwd.parametrizations import Parametrization, chain
from tfwd.parametrizations.chain import BoundParametrization
from tfwd.parametrizations.parametrized_layers import IN_PLACE, ParametrizedWeight, added_in_place


class Present(NamedTuple):
    """The present training call of one `InPlace`.

    Attributes:
        state: int64 `[root, number of this call]`. None in a call that only creates weights.
        seeds: Seed of each parametrized weight, by the weight's position.
        training: Training flag of the innermost container.
        covered: Ids of the variables that an effective layer around this point substitutes.
        values: Effective weights that containers have read, by the id of the variable, with the
            graph in which each was computed.
    """

    state: tf.Tensor | None
    seeds: dict[int, tf.Tensor]
    training: bool | tf.Tensor
    covered: frozenset[int]
    values: dict[int, list[tuple[tf.Graph | None, tf.Tensor]]]


_local = threading.local()
# Stands for a call that only creates weights.
_NO_CALL = Present(None, {}, False, frozenset(), {})


def _present_calls() -> dict[InPlace, Present]:
    """Returns the present calls on this thread. The outermost comes first."""
    return getattr(_local, "calls", {})


@contextlib.contextmanager
def _restored(calls: dict[InPlace, Present]) -> Iterator[None]:
    before = _present_calls()
    _local.calls = calls
    try:
        yield
    finally:
        _local.calls = before


class Replay(Protocol):
    """Interface of an object that lets several passes use the same draws."""

    def call(self, link: Link, plain: Callable[[], Any]) -> Any:
        """Runs `plain`, a layer's call on raw weights, on the effective weights of `link`."""

    def state(self, owner: InPlace, draw: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns the seed and the number of the next call in this pass. `draw` takes a new one."""


@contextlib.contextmanager
def replayed(replay: Replay) -> Iterator[None]:
    """Asks an object for the numbers of the calls in the body, on this thread."""
    before = getattr(_local, "replay", None)
    _local.replay = replay
    try:
        yield
    finally:
        _local.replay = before


class InPlace:
    """Parametrizations of the weights of one layer or model, which stays the same object.

    Args:
        target: Built layer or model.
        targeted: Parametrized weights. Positions are indices in `target.weights`.
        patterns: For each parametrized weight the pattern that selected it.
        seed: int. Default None, which draws one from Keras's global seed.
        recompute: bool. As in `Parametrized`. Default True.
        share_across_replicas: bool. As in `Parametrized`. Default False.

    Attributes:
        calls: Number of training calls so far.
    """

    def __init__(
        self,
        target: keras.Layer,
        targeted: TargetedWeights,
        patterns: Sequence[str | None],
        seed: int | None = None,
        recompute: bool = True,
        share_across_replicas: bool = False,
    ) -> None:
        self.target = target
        self.targeted = targeted
        self.patterns = patterns
        self.seed = checked_seed(seed)
        self.recompute = recompute
        self.references: References | None = None
        elements = [element for _, p in targeted for element in p.elements()]
        self.is_stochastic = all(element.stochastic for element in elements)
        self.draws_at_all = any(element.stochastic for element in elements)
        with _scope_of(targeted[0][0].variable):
            self.draws = SeedStream(seed, share_across_replicas)
            if any(element.has_reference for element in elements):
                self.references = References(target.name)
                self.references.create(targeted)
        self.by_id = {id(t.variable): (t, p) for t, p in targeted}
        self._reads_elsewhere = not all(map(_is_keras_call, _keras.layers.all_layers(target)))
        self._links = [
            Link(self, layer, own)
            for layer in _distinct(_keras.layers.all_layers(target))
            if (own := self._of(layer)) is not None
        ]

    def _of(self, layer: keras.Layer) -> TargetedWeights | None:
        """Returns the weights that a layer substitutes, or None if it is not hooked."""
        inside = [self.by_id[id(v)] for v in layer.weights if id(v) in self.by_id]
        if not inside:
            return None
        own = {id(v) for v in _keras.layers.held_weights(layer)}
        if isinstance(layer, (keras.layers.RNN, keras.layers.Wrapper)):
            return inside
        return inside if any(id(t.variable) in own for t, _ in inside) else []

    def add(self) -> None:
        """Hooks all layers."""
        for link in self._links:
            hooks.add(link.layer, link, weight_patterns.QUANTIZED if link.is_effective else "")

    def remove(self) -> None:
        """Removes the hooks."""
        for link in self._links:
            hooks.remove(link.layer, link)

    @property
    def calls(self) -> int | tf.Tensor:
        return self.draws.calls

    def begin(self, layer: keras.Layer, training: bool | tf.Tensor) -> Present:
        """Takes a call number for an outermost call of a layer."""
        if training is not False:
            if self.draws_at_all:
                recomputed_calls.check(layer.name)
            if self.references is not None:
                with _restored({}):  # reads raw weights
                    self.references.copy_due(training)
        replay = getattr(_local, "replay", None)
        if training is False:
            state = tf.zeros([2], tf.int64)
        elif replay is None:
            state = self.draws.next(training)
        else:
            state = replay.state(self, lambda: self.draws.next(training))
        positions = [target.position for target, _ in self.targeted]
        seeds = self.draws.seeds_of(state, positions)
        return Present(state, dict(zip(positions, seeds, strict=True)), training, frozenset(), {})

    @contextlib.contextmanager
    def effective_reads(self, layer: keras.Layer) -> Iterator[None]:
        """Lets code that reads weights of other layers in the body read effective weights."""
        if not self._reads_elsewhere:
            yield
            return
        with _Reads(self) as scope:
            yield
        for loss in scope.losses:
            _keras.layers.add_loss(layer, loss)

    def effective(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns what a container reads of a variable, or None for the variable's own value."""
        chains: list[tuple[InPlace, Present, Target, Parametrization]] = []
        calls = _present_calls()
        for one, present in reversed(calls.items()):
            found = one.by_id.get(id(variable))
            if found is None or id(variable) in present.covered:
                continue
            if present.training is False and one.is_stochastic:
                continue
            chains.append((one, present, *found))
        if not chains or chains[0][0] is not self:
            return None
        stored = chains[0][1].values.setdefault(id(variable), [])
        here = _keras.present_graph()
        for graph, value in stored:
            if graph is here:
                return value
        covered = {
            one: present._replace(covered=present.covered | {id(variable)})
            for one, present in calls.items()
        }
        with _restored(covered):
            raw = _keras.variables.value(variable)

        def computed(training: bool) -> tf.Tensor:
            bound = [one.bound(present, t, p, training) for one, present, t, p in chains]
            return chain.apply(raw, bound)

        value = training_flag.call_with_bool(chains[0][1].training, computed)
        stored.append((here, value))
        return value

    def bound(
        self, present: Present, target: Target, parametrization: Parametrization, training: bool
    ) -> BoundParametrization:
        """Returns a weight's parametrization in the present call."""
        number = tf.raw_ops.Unpack(value=present.state, num=2)[1]
        seed = present.seeds[target.position]
        values = [v.read_value() for v in self.references_of(target, parametrization)]
        return BoundParametrization(parametrization.at(number), seed, training, values)

    def references_of(self, target: Target, parametrization: Parametrization) -> list[tf.Variable]:
        """Returns the references of a weight."""
        return [] if self.references is None else self.references.of(target, parametrization)

    def _parametrized_weights(self) -> list[ParametrizedWeight]:
        return [
            ParametrizedWeight(pattern, target, parametrization)
            for pattern, (target, parametrization) in zip(self.patterns, self.targeted, strict=True)
        ]

    def effective_weights(
        self, call: int | tf.Tensor, examples: int | None = None
    ) -> dict[str, tf.Tensor]:
        """Returns the exact weights that a training call uses on replica 0.

        They are computed from the present raw weights. Earlier parametrizations of the same weight
        count as called in each call.

        Args:
            call: int. Number of the training call, from 0. `effective_weights(added.calls)` returns
                the weights of the next training call.
            examples: int. As in `Parametrized.effective_weights`. Default None.

        Returns:
            dict from a weight's name to a tensor of its shape and dtype. The name is the shortest
            end of the weight's path that is unique in the target.
        """
        return self.effective_of(self.targeted, call, examples)

    def effective_of(
        self, targeted: TargetedWeights, call: int | tf.Tensor, examples: int | None = None
    ) -> dict[str, tf.Tensor]:
        """Returns some of the weights of `effective_weights`."""
        result = {}
        ahead = call - self.calls
        for target, _ in targeted:
            variable = target.variable
            bound, last = chain.per_example(self._bound_so_far(variable, ahead))
            result[target.name] = chain.apply(_keras.variables.value(variable), bound)
            if last is not None:
                per_example_call.check_examples(self.target, target, examples)
                element, seed = last
                result[target.name] = element.of_examples(result[target.name], seed, examples)
        return result

    def _bound_so_far(
        self, variable: keras.Variable, ahead: int | tf.Tensor
    ) -> list[BoundParametrization]:
        """Returns a variable's parametrizations in order, up to this one."""
        links = [x for x in hooks.links_in(self.target) if id(variable) in x.substituted]
        inside = {id(layer) for layer in _keras.layers.all_layers(self.target)}
        outside = {link.in_place for link in links if link.in_place.acts_beyond(variable, inside)}
        found = owned_parametrizations(self.target, variable, ahead, frozenset(outside - {self}))
        owners = [owner for owner, _ in found]
        last = owners.index(self) + 1 if self in owners else len(owners)
        return [bound for _, bound in found[:last]]

    def acts_beyond(self, variable: keras.Variable, layers: set[int]) -> bool:
        """Returns True if a variable is substituted for another layer than those with some ids."""
        return any(
            id(link.layer) not in layers for link in self._links if id(variable) in link.substituted
        )

    def bound_ahead(
        self, variable: keras.Variable, ahead: int | tf.Tensor
    ) -> list[BoundParametrization]:
        """Returns a variable's parametrization `ahead` calls from now, if it has one."""
        found = self.by_id.get(id(variable))
        if found is None or found[1].is_identity:
            return []
        target, parametrization = found
        number = tf.cast(ahead + self.calls, tf.int64)
        seed = self.draws.seed_at(number, target.position)
        values: Any = ()
        if self.references is not None:
            values = self.references.current_values(target, parametrization)
        return [BoundParametrization(parametrization.at(number), seed, True, values)]


class _Reads(_keras.variables.Substitution):
    """A substitution of weights that are read outside a call of their own layer."""

    def __init__(self, owner: InPlace) -> None:
        super().__init__([], capture=False)
        self._owner = owner

    def get_current_value(self, variable: Any) -> tf.Tensor | None:
        value = self._owner.effective(variable)
        return super().get_current_value(variable) if value is None else value


class _PresentDraws:
    """The draws of the present call, in place of a layer's own `SeedStream`."""

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
        """Returns the number of the present call, which its outermost layer has counted."""
        return _present_calls()[self._owner].state

    def seeds_of(self, state: tf.Tensor, positions: list[int]) -> list[tf.Tensor]:
        """Returns the seeds of the weights at some positions."""
        present = _present_calls()[self._owner].seeds
        return [present[position] for position in positions]


class Link(WeightPerturbationMixin):
    """One `InPlace` in the call of one layer.

    Args:
        owner: The `InPlace`.
        layer: Hooked layer.
        targeted: Weights that the layer substitutes. Empty for a container.
    """

    def __init__(self, owner: InPlace, layer: keras.Layer, targeted: TargetedWeights) -> None:
        self.in_place = owner
        self.layer = layer
        self.name = layer.name
        self.parametrizations = {target.path: p for target, p in targeted}
        self.references = owner.references
        self.draws: Any = _PresentDraws(owner)
        self._call_cache = _CallCache()
        self._own = targeted
        self.substituted = frozenset(id(target.variable) for target, _ in targeted)
        if targeted:
            names = {id(target.variable): target.name for target, _ in targeted}
            reads.check_normalized(layer, names)
            per_example_call.check(layer, targeted)

    @property
    def is_effective(self) -> bool:
        """True if the layer runs on effective weights. False for a container."""
        return bool(self._own)

    @property
    def calls(self) -> int | tf.Tensor:
        """Number of the present call."""
        number = tf.raw_ops.Unpack(value=_present_calls()[self.in_place].state, num=2)[1]
        return int(number) if tf.executing_eagerly() else number

    def effective_weights(
        self, call: int | tf.Tensor, examples: int | None = None
    ) -> dict[str, tf.Tensor]:
        """Returns the weights that this layer substitutes in a training call."""
        return self.in_place.effective_of(self._own, call, examples)

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
        return hooks.is_first_link(self.layer, self)

    def _targeted(self) -> TargetedWeights:
        self._call_cache.targeted_from = ()
        return self._own

    def _begun_references(self, training: bool | tf.Tensor) -> list[tf.Variable]:
        held = super()._begun_references(training)
        own = [v for pair in self._own for v in self.in_place.references_of(*pair)]
        return [*held, *own]

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the layer, on effective weights in training.

        Args:
            function: The link before this one, or the layer's own call.
            *args: Positional arguments of the layer's `call`.
            **kwargs: Keyword arguments of the layer's `call`.
        """
        owner = self.in_place
        training, names, values = _keras.layers.split_training(self.layer, args, kwargs)
        flag = training_flag.standardize(training)
        step = training_steps.present()
        if training is None and step is not None:
            flag, function = True, functools.partial(_in_training, function)
        acting = True if sampled_calls.is_sampling() else flag
        is_raw = acting is False and owner.is_stochastic
        if is_raw or (graphs.is_saving() and acting is not False) or _keras.layers.is_symbolic():
            return self._passed_on(owner, flag, function, args, kwargs)
        present = _present_calls().get(owner)
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
        """Lets the layer create weights that a call of this kind uses, outside all scopes."""
        key = flag if isinstance(flag, bool) else None
        made_for = self._call_cache.made_for
        if key not in made_for and _keras.layers.awaits_call(self.layer):
            made_for.add(key)
            with _restored({**_present_calls(), self.in_place: _NO_CALL}):
                _keras.layers.build_by_call(self.layer, args, kwargs)
        made_for.add(key)

    def _begun_inside(self, training: bool | tf.Tensor) -> dict[InPlace, Present]:
        """Takes call numbers for parametrizations of layers inside, before the call is traced."""
        present = {*_present_calls(), self.in_place}
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
        calls = _present_calls()
        if owner in calls:
            calls = {**calls, owner: calls[owner]._replace(training=flag)}
        with _restored(calls):
            return function(*args, **kwargs)

    def _run(
        self,
        present: Present,
        flag: bool | tf.Tensor,
        function: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls the layer within the present call.

        Args:
            present: Present call of the parametrizations.
            flag: Training flag of the layer.
            function: The link before this one, or the layer's own call.
            args: Positional arguments.
            kwargs: Keyword arguments, without the training flag.
        """
        outer = _present_calls()
        covered = present.covered | self.substituted
        acting = True if sampled_calls.is_sampling() else flag
        layer = self.layer
        begun = {} if self.substituted <= present.covered else self._begun_inside(acting)
        own = present._replace(training=acting, covered=covered)
        inner = {**outer, self.in_place: own, **begun}
        accepts = _keras.layers.accepts_training(layer)

        def plain(*args: Any, training: Any, **kwargs: Any) -> Any:
            if accepts:
                kwargs["training"] = training
            return function(*args, **kwargs)

        # Backward may call it again, after the outermost call has ended.
        def within(used: Callable[..., Any], *args: Any, training: Any, **kwargs: Any) -> Any:
            sampled = sampled_calls.is_sampling()
            now = inner[self.in_place]._replace(training=True if sampled else training)
            with _restored({**inner, self.in_place: now}):
                return used(*args, training=training, **kwargs)

        call = functools.partial(within, plain)
        if self.substituted <= present.covered:
            return call(*args, training=flag, **kwargs)
        replay = getattr(_local, "replay", None)
        if replay is not None and flag is True:
            with _restored(self._preparing(inner)):
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
        with _restored(self._preparing(inner)):
            return self._perturbed_call(used, args, kwargs, flag, call)

    def _preparing(self, calls: dict[InPlace, Present]) -> dict[InPlace, Present]:
        """Returns the present calls for reads before the layer's call, which need raw values.

        Each link of the layer, this one and earlier ones, computes its own weights in the call.
        """
        hook = hooks.hook_of(self.layer)
        links = [] if hook is None else hook.links
        own = self.substituted.union(*(link.substituted for link in links))
        return {one: now._replace(covered=now.covered | own) for one, now in calls.items()}


def _in_training(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a layer with the training flag of Keras set for the layers inside it."""
    with _keras.layers.CallState().restored(True):
        return function(*args, **kwargs)


def _scope_of(variable: keras.Variable) -> contextlib.AbstractContextManager[Any]:
    """Returns the scope of the `tf.distribute` strategy under which a variable was created."""
    strategy: Any = getattr(_keras.variables.tf_variable(variable), "distribute_strategy", None)
    is_present = strategy is None or strategy is tf.distribute.get_strategy()
    return contextlib.nullcontext() if is_present else strategy.scope()


def _is_keras_call(layer: keras.Layer) -> bool:
    """Returns True if a layer's call is one of Keras, which reads only the layer's own weights."""
    known = _keras.is_of_keras(type(layer), "call")
    return known and not isinstance(layer, keras.layers.Lambda)


def _distinct(layers: list[keras.Layer]) -> list[keras.Layer]:
    return list({id(layer): layer for layer in layers}.values())


class _Held:
    """The parametrizations of one target, the first applied first."""

    def __init__(self) -> None:
        self.all: list[InPlace] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        return _Held()

    def __reduce__(self) -> Any:
        return _Held, ()


def inside(layer: keras.Layer) -> list[InPlace]:
    """Returns the parametrizations that have a layer, or a layer in it, as their target."""
    return [
        one for inner in _distinct(_keras.layers.all_layers(layer)) for one in added_in_place(inner)
    ]


def around(layer: keras.Layer) -> list[InPlace]:
    """Returns the parametrizations that hook a layer."""
    hook = hooks.hook_of(layer)
    return [] if hook is None else [link.in_place for link in hook.links]


def evaluation_weights(layer: keras.Layer) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Returns the weights that evaluation changes in place, with the values that it uses.

    Raises:
        ValueError: If a wrapper of the same weight also acts in evaluation.
    """
    found = []
    targeted = {id(t.variable): t for one in inside(layer) for t, _ in one.targeted}
    for target in targeted.values():
        acting = [
            (owner, bound._replace(training=False))
            for owner, bound in owned_parametrizations(layer, target.variable, 0)
            if not all(element.stochastic for element in bound.parametrization.elements())
        ]
        wrappers = [owner for owner, _ in acting if not isinstance(owner, InPlace)]
        if len(wrappers) == len(acting):
            continue
        if wrappers:
            raise ValueError(
                f"weight '{target.name}' of layer '{layer.name}' cannot be folded, because wrapper "
                f"'{wrappers[0].name}' also acts in evaluation: use one parametrization with "
                "Chain([p, q])"
            )
        raw = _keras.variables.value(target.variable)
        found.append((target.variable, chain.apply(raw, [bound for _, bound in acting])))
    return found


def add(owner: InPlace) -> None:
    """Adds a parametrization to its target, or leaves the target as it was if that fails."""
    held = vars(owner.target).get(IN_PLACE)
    if held is None:
        held = _Held()
        # Keras would track the attribute otherwise.
        object.__setattr__(owner.target, IN_PLACE, held)
    held.all.append(owner)
    try:
        owner.add()
        _track(owner.target, held)
    except BaseException:  # such as Ctrl-C
        remove(owner)
        raise


def remove(owner: InPlace) -> None:
    """Removes a parametrization from its target."""
    owner.remove()
    held = vars(owner.target)[IN_PLACE]
    held.all.remove(owner)
    _track(owner.target, held)
    if not held.all:
        object.__delattr__(owner.target, IN_PLACE)


class _States(tf.Module):
    """The states of a target's parametrizations, for TensorFlow's checkpoints."""

    def __init__(self, held: _Held) -> None:
        super().__init__()
        self.draws = [one.draws for one in held.all]
        self.references = [one.references for one in held.all if one.references is not None]


def _track(target: keras.Layer, held: _Held) -> None:
    _keras.untrack(target, IN_PLACE)
    if held.all:
        _keras.track(target, IN_PLACE, _States(held))
