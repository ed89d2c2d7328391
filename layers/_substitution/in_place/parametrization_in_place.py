"""`InPlace`: the parametrizations of one target, with their draws, references and values."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras, training_flag
from tfwd.layers._substitution import (
    acting_parametrizations,
    caller_detection,
    method_hooks,
    per_example_call,
)
from tfwd.layers._substitution.in_place import draw_replay, running_calls
from tfwd.layers._substitution.reference_weights import References
from tfwd.layers._substitution.seed_stream import SeedStream, checked_seed
from tfwd.layers._substitution.weight_selection import Target, TargetedWeights
from tfwd.parametrizations import Parametrization, chain
from tfwd.parametrizations.chain import BoundParametrization
from tfwd.parametrizations.parametrized_layers import ParametrizedWeight

_numbers = itertools.count()


class InPlace:
    """Parametrizations of the weights of one layer or model, which stays the same object.

    Args:
        target: Built layer or model.
        targeted: Parametrized weights. Positions are indices in `target.weights`.
        patterns: The pattern that selected each parametrized weight.
        seed: int. Default None, which draws a seed from Keras's global seed.
        recompute: bool. As in `Parametrized`. Default True.
        share_across_replicas: bool. As in `Parametrized`. Default False.

    Attributes:
        calls: Number of training calls so far.
        addition_number: Number of this parametrization, in the order in which they were added.
        links: Its links in the hooks of layers. `installation` sets them.
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
        self.addition_number = next(_numbers)
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
        self.links: list[method_hooks.Link] = []

    @property
    def calls(self) -> int | tf.Tensor:
        return self.draws.calls

    def begin(self, layer: keras.Layer, training: bool | tf.Tensor) -> running_calls.RunningCall:
        """Takes a call number for an outermost call of a layer."""
        if training is not False:
            if self.draws_at_all:
                caller_detection.check_not_recomputed(layer.name)
            if self.references is not None:
                with running_calls.using_calls({}):  # reads raw weights
                    self.references.copy_due(training)
        replay = draw_replay.current_replay()
        if training is False:
            state = tf.zeros([2], tf.int64)
        elif replay is None:
            state = self.draws.next(training)
        else:
            state = replay.state(self, lambda: self.draws.next(training))
        positions = [target.position for target, _ in self.targeted]
        seeds = self.draws.seeds_from_state(state, positions)
        return running_calls.RunningCall(
            state, dict(zip(positions, seeds, strict=True)), training, frozenset(), {}
        )

    @contextlib.contextmanager
    def effective_reads(self, layer: keras.Layer) -> Iterator[None]:
        """Makes code in the body read effective weights of other layers."""
        if not self._reads_elsewhere:
            yield
            return
        with _Reads(self) as scope:
            yield
        for loss in scope.losses:
            _keras.layers.add_loss(layer, loss)

    def effective(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns the value that a container reads, or None for the variable's own value."""
        chains: list[tuple[InPlace, running_calls.RunningCall, Target, Parametrization]] = []
        calls = running_calls.by_owner()
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
        with running_calls.using_calls(covered):
            raw = _keras.variables.value(variable)

        def computed(training: bool) -> tf.Tensor:
            bound = [
                (one.addition_number, one.bound(present, t, p, training))
                for one, present, t, p in chains
            ]
            return chain.apply(raw, chain.in_order(bound))

        value = training_flag.call_with_bool(chains[0][1].training, computed)
        stored.append((here, value))
        return value

    def bound(
        self,
        present: running_calls.RunningCall,
        target: Target,
        parametrization: Parametrization,
        training: bool,
    ) -> BoundParametrization:
        """Returns a weight's parametrization in the running call."""
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

        They are computed from the present raw weights. This assumes that each call also runs
        earlier parametrizations of the same weight.

        Args:
            call: int. Number of the training call, from 0. `effective_weights(added.calls)` returns
                the weights of the next training call.
            examples: int. As in `Parametrized.effective_weights`. Default None.

        Returns:
            dict from a weight's name to a tensor of its shape and dtype. The name is the shortest
            suffix of the weight's path that is unique in the target.
        """
        return self.effective_of(self.targeted, call, examples)

    def effective_of(
        self, targeted: TargetedWeights, call: int | tf.Tensor, examples: int | None = None
    ) -> dict[str, tf.Tensor]:
        """Returns some of the weights of `effective_weights`."""
        targets = [target for target, _ in targeted]
        variables = [target.variable for target in targets]
        found = acting_parametrizations.acting(self.target, variables, call - self.calls, self)
        return {
            target.name: per_example_call.effective_weight(
                self.target, target, self._so_far(found[id(target.variable)]), examples
            )
            for target in targets
        }

    def _so_far(self, acting: acting_parametrizations.Acting) -> list[BoundParametrization]:
        """Returns a weight's parametrizations up to and including this `InPlace`."""
        owners = [owner for owner, _ in acting]
        last = owners.index(self) + 1 if self in owners else len(owners)
        return [bound for _, bound in acting[:last]]


class _Reads(_keras.substitution.Substitution):
    """A substitution of weights that are read outside a call of their own layer."""

    def __init__(self, owner: InPlace) -> None:
        super().__init__([], capture=False)
        self._owner = owner

    def get_current_value(self, variable: Any) -> tf.Tensor | None:
        value = self._owner.effective(variable)
        return super().get_current_value(variable) if value is None else value


def _scope_of(variable: keras.Variable) -> contextlib.AbstractContextManager[Any]:
    """Returns the scope of the `tf.distribute` strategy under which a variable was created."""
    strategy: Any = getattr(_keras.variables.tf_variable(variable), "distribute_strategy", None)
    is_present = strategy is None or strategy is tf.distribute.get_strategy()
    return contextlib.nullcontext() if is_present else strategy.scope()


def _is_keras_call(layer: keras.Layer) -> bool:
    """Returns True if Keras defines a layer's call. It then reads only the layer's own weights."""
    known = _keras.is_of_keras(type(layer), "call")
    return known and not isinstance(layer, keras.layers.Lambda)
