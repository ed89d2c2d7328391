"""`SubstitutedCall`: one call of a layer that can run on effective weights, and run again.

The call is a function of tensors and seeds. So `tfwd._graph.recomputed_weights` can run it a second
time in backward, and `tf.cond` can run it in a branch.

Nested wrappers form one chain that begins with the inner wrapper. Parametrizations in place act in
the order in which they were added (`chain.in_order`). An inner wrapper on the same weight starts
from the raw value, and applies the whole chain.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras, parametrization_rates, training_flag
from tfwd._graph import recomputed_weights, stateless_call
from tfwd._random import masks_and_normals
from tfwd.layers._substitution import call_packing, caller_detection, outer_wrappers
from tfwd.layers._substitution.attribute_snapshots import AttributeSnapshot
from tfwd.layers._substitution.call_analysis import CallAnalysis
from tfwd.layers._substitution.outer_wrappers import OuterWrapper
from tfwd.layers._substitution.reference_weights import References, read
from tfwd.layers._substitution.seed_stream import SeedStream
from tfwd.layers._substitution.weight_selection import TargetedWeights
from tfwd.parametrizations import chain
from tfwd.parametrizations.chain import BoundParametrization


class SubstitutedCall:
    """One call, split into tensors and seeds from which it can run again."""

    def __init__(
        self,
        name: str,
        draws: SeedStream,
        function: Callable[..., Any],
        variables: list[keras.Variable],
        targeted: TargetedWeights,
        args: tuple,
        kwargs: Mapping[str, Any],
        training: bool | tf.Tensor,
        references: References | None = None,
        held: Sequence[tf.Variable] = (),
        addition_number: int | None = None,
    ) -> None:
        """Prepares `function(*args, training=training, **kwargs)` on effective weights.

        Args:
            name: Name of the layer, for messages.
            draws: Counter of the training calls.
            function: The layer's call.
            variables: Variables that the layer lists.
            targeted: Parametrized weights.
            args: Positional arguments.
            kwargs: Keyword arguments.
            training: Training flag.
            references: References of the parametrized weights. Default None, if no weight has one.
            held: All references of the layer and of wrappers inside it. Default none.
            addition_number: Number of the parametrization in place. Default None, for a wrapper.
        """
        self.name = name
        self._own = [references.of(t, p) if references else [] for t, p in targeted]
        self.function = function
        self.training = training
        self.addition_number = addition_number
        self.variables = list(variables)
        self.wrappers = outer_wrappers.present()
        self._state = _keras.layer_calls.CallState()
        self._given = args, kwargs
        self._arguments = call_packing.Arguments(args, dict(kwargs))
        if training is False or not targeted:
            state = tf.zeros([2], tf.int64)
        else:
            if any(one.stochastic for _, p in targeted for one in p.elements()):
                caller_detection.check_not_recomputed(name)
            state = draws.next(training)
        number = tf.raw_ops.Unpack(value=state, num=2)[1]
        self.targeted = []
        for target, parametrization in targeted:
            with parametrization_rates.named_in_errors(f"weight '{target.name}' of layer '{name}'"):
                self.targeted.append((target, parametrization.at(number)))
        self.seeds = draws.seeds_from_state(state, [target.position for target, _ in targeted])
        # A weight that only outer wrappers parametrize is read with their effective value. An inner
        # wrapper may still need the raw value.
        self._raw = {id(t.variable): self.raw(t.variable) for t, _ in targeted}
        self._carried = [v for v in variables if id(v) not in self._raw and self._wrapper_of(v)]
        self._references = {id(v): self._reference(v) for v in held}
        # References of outer wrappers are arguments too, because they may have gradients.
        for wrapper in self.wrappers:
            for key in filter(wrapper.bound.__contains__, self._raw):
                given = wrapper.references_of(key)
                self._references.update((i, wrapper.references[i]) for i in given)

    @functools.cached_property
    def tensors(self) -> list[tf.Tensor]:
        """All inputs of the call: its arguments, and the values of its variables."""
        raw, read = self._raw, _keras.variables.value
        return [
            *self._arguments.tensors,
            *(self.raw(v) for v in self._carried),
            *(raw[id(v)] if id(v) in raw else read(v) for v in self.variables),
            *self._references.values(),
        ]

    def extend(self, variables: list[keras.Variable]) -> None:
        """Adds variables that the layer reads but does not list, such as states of an RNN."""
        known = {id(v) for v in self.variables}
        if variables := [v for v in variables if id(v) not in known]:
            self.variables += variables
            vars(self).pop("tensors", None)

    def analysis_key(self) -> tuple:
        """Returns the key of this call's analysis."""
        weights = tuple(id(v) for v in self.variables)
        flag = self.training if isinstance(self.training, bool) else None
        arguments = self._arguments.signature()
        return arguments, weights, flag, tf.executing_eagerly(), len(self.wrappers)

    def shared_analysis_key(self) -> tuple:
        """Returns the key without this layer's weights. Calls of equal layers have equal keys."""
        positions = {id(v): i for i, v in enumerate(self.variables)}
        kinds = tuple((positions[id(t.variable)], repr(p)) for t, p in self.targeted)
        variables = tuple((str(v.dtype), len(v.shape)) for v in self.variables)
        flag = self.training if isinstance(self.training, bool) else None
        return self._arguments.signature(), kinds, variables, flag, tf.executing_eagerly()

    def is_worth_recomputing(self) -> bool:
        """Returns True if an effective weight is large enough that drawing it again is better.

        Masks of examples do not count, because the layer's product does not store them.
        """
        return not all(
            masks_and_normals.is_small(tuple(target.variable.shape))
            for target, p in self.targeted
            if not all(element.per_example for element in p.elements())
        )

    def runs_again(self) -> bool:
        """Returns True if backward would have to run the layer a second time."""
        return tf.executing_eagerly() or not isinstance(self.training, bool)

    def run_directly(self, training: bool) -> stateless_call.Result:
        """Makes the call directly: updates are made, and effective weights are stored."""
        references = self._references
        weights = self._effective(self._raw, training, self.seeds, references)
        raw = dict(self._raw)
        return self._call(*self._given, training, self.seeds, raw, references, weights, [])

    def run(
        self, analysis: CallAnalysis, recomputed: bool, before: AttributeSnapshot | None
    ) -> stateless_call.Result:
        """Makes the call with a custom gradient, or in branches. Its updates are returned.

        Args:
            analysis: Known facts about the call.
            recomputed: bool. Backward computes the effective weights again.
            before: Attributes of the layers in the first run. None if the layers run only once.
        """
        branches = None
        if not isinstance(self.training, bool):
            branches = call_packing.CommonBranchResults(analysis.updated, analysis.losses)
        packed = call_packing.Results(self.name, self._arguments, branches)
        capture = not analysis.impure

        def function(training: bool, tensors: list, seeds: list, weights: list) -> list[tf.Tensor]:
            # The user may have changed the layer since the first run.
            with contextlib.nullcontext() if before is None else before.restored():
                return packed.pack(self.evaluate(training, tensors, seeds, weights, capture))

        tensors = self.tensors  # read outside the branches

        def storing(training: bool) -> list[tf.Tensor]:
            weights = self.weights(training, tensors, self.seeds)
            return function(training, tensors, self.seeds, weights)

        if recomputed:
            flat = recomputed_weights.call(
                self.weights, function, self.training, tensors, self.seeds
            )
        else:
            flat = training_flag.call_with_bool(self.training, storing)
        return packed.unpack(list(flat))

    def weights(self, training: bool, tensors: list, seeds: list) -> list[tf.Tensor]:
        """Computes the effective values of the parametrized weights, from raw values and seeds."""
        references = self._references_in(tensors)
        return self._effective(self._values(tensors), training, seeds, references)

    def _effective(
        self,
        raw: dict[int, tf.Tensor],
        training: bool,
        seeds: list,
        references: dict[int, tf.Tensor],
    ) -> list[tf.Tensor]:
        chains = self.chains(training, seeds, references)
        return [
            chain.apply(raw[id(target.variable)], chain.per_example(bound)[0])
            for (target, _), bound in zip(self.targeted, chains, strict=True)
        ]

    def chains(
        self, training: bool, seeds: list, references: dict[int, tf.Tensor] | None = None
    ) -> list[list[BoundParametrization]]:
        """Returns the parametrizations of each weight, of this wrapper and of those around it.

        Args:
            training: Training flag.
            seeds: One seed per weight.
            references: Values of the references, by the variables' ids. Default None, for their
                present values.
        """
        chains = []
        references = self._references if references is None else references
        bound = self._bound(training, seeds, references)
        for (target, _), own in zip(self.targeted, bound, strict=True):
            key = id(target.variable)
            around = [
                (
                    w.addition_number,
                    w.bound[key]._replace(references=[references[i] for i in w.references_of(key)]),
                )
                for w in reversed(self.wrappers)
                if key in w.bound
            ]
            chains.append(chain.in_order([(self.addition_number, own), *around]))
        return chains

    def _bound(
        self, training: bool, seeds: list, references: dict[int, tf.Tensor]
    ) -> list[BoundParametrization]:
        """Returns this wrapper's parametrization of each weight, with its seed."""
        return [
            BoundParametrization(p, seed, training, [references[id(v)] for v in own])
            for (_, p), seed, own in zip(self.targeted, seeds, self._own, strict=True)
        ]

    def _values(self, tensors: list) -> dict[int, tf.Tensor]:
        after = len(self._arguments.tensors) + len(self._carried)
        values = tensors[after : after + len(self.variables)]
        return {id(v): t for v, t in zip(self.variables, values, strict=True)}

    def _references_in(self, tensors: list) -> dict[int, tf.Tensor]:
        last = tensors[len(tensors) - len(self._references) :]
        return dict(zip(self._references, last, strict=True))

    def evaluate(
        self, training: bool, tensors: list, seeds: list, weights: list, capture: bool
    ) -> stateless_call.Result:
        """Calls the layer on effective weights."""
        inputs = len(self._arguments.tensors)
        args, kwargs = self._arguments.rebuild(tensors[:inputs])
        values = self._values(tensors)
        raw = {id(v): t for v, t in zip(self._carried, tensors[inputs:], strict=False)}
        raw |= {key: values[key] for key in self._raw}
        # Without capture the other variables are not substituted, because the call updates them in
        # place.
        others = [(v, values[id(v)]) for v in self.variables if capture and id(v) not in self._raw]
        references = self._references_in(tensors)
        return self._call(args, kwargs, training, seeds, raw, references, weights, others, capture)

    @caller_detection.repeats_draws
    def _call(
        self,
        args: tuple,
        kwargs: Mapping[str, Any],
        training: bool,
        seeds: list,
        raw: dict[int, tf.Tensor],
        references: dict[int, tf.Tensor],
        weights: list,
        others: list[tuple[keras.Variable, tf.Tensor]],
        capture: bool = False,
    ) -> stateless_call.Result:
        links = zip(self.targeted, self._bound(training, seeds, references), strict=True)
        bound = {id(target.variable): link for (target, _), link in links}
        wrapper = OuterWrapper(raw, bound, {}, references, self.addition_number)
        effective = zip((target.variable for target, _ in self.targeted), weights, strict=True)
        with outer_wrappers.within([*self.wrappers, wrapper]), self._state.restored(training):
            result = stateless_call.call(
                lambda: self.function(*args, training=training, **kwargs),
                [*others, *effective],
                capture,
            )
        return result._replace(read=result.read | wrapper.taken)

    def _reference(self, variable: tf.Variable) -> tf.Tensor:
        """Returns the value of a reference. An outer wrapper's value has precedence."""
        found = (w.references[id(variable)] for w in self.wrappers if id(variable) in w.references)
        known = next(found, None)
        return read(variable) if known is None else known

    def _wrapper_of(self, variable: keras.Variable) -> OuterWrapper | None:
        return next((w for w in reversed(self.wrappers) if id(variable) in w.raw), None)

    def raw(self, variable: keras.Variable) -> tf.Tensor:
        """Returns the value of a weight without any parametrization."""
        wrapper = self._wrapper_of(variable)
        if wrapper is None:
            return _keras.variables.value(variable)
        wrapper.taken[id(variable)] = variable
        return wrapper.raw[id(variable)]
