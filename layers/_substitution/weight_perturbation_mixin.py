"""`WeightPerturbationMixin`: base class of all layers that compute with functions of weights.

A training call takes a call number. It computes each weight's effective value from the raw value
and a seed. It runs the layer with the effective values in place of the variables. Around the call,
`tfwd._graph.recomputed_weights` stores only the arguments for backward.

In eager mode, or under a training flag that is a tensor, backward runs the layer a second time.
This needs a proof that the layer computes the same again (see `traced_call_analysis` and
`keras_own_layers`). Other layers store their effective weights.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras, training_flag
from tfwd._graph import custom_gradient, private_graph_apis, stateless_call
from tfwd.layers._substitution import (
    acting_parametrizations,
    call_packing,
    caller_detection,
    embedding_lookup,
    keras_own_layers,
    method_hooks,
    outer_wrappers,
    per_example_call,
    reference_weights,
    traced_call_analysis,
    unsupported_weight_reads,
    weight_selection,
    weight_setters,
)
from tfwd.layers._substitution.attribute_snapshots import AttributeSnapshot
from tfwd.layers._substitution.call_analysis import CallAnalysis
from tfwd.layers._substitution.reference_weights import References
from tfwd.layers._substitution.seed_stream import SeedStream, checked_seed
from tfwd.layers._substitution.substituted_call import SubstitutedCall
from tfwd.layers._substitution.trainable_gains import Gains
from tfwd.layers._substitution.weight_selection import (
    Parametrizations,
    Target,
    TargetedWeights,
)
from tfwd.parametrizations import Parametrization, chain
from tfwd.parametrizations.chain import BoundParametrization
from tfwd.parametrizations.parametrized_layers import ParametrizedWeight
from tfwd.pretrained import weight_change_listeners

# Attributes that a plain layer on the same variables does not have.
PERTURBATION_ATTRIBUTES = frozenset(
    {"draws", "gains", "references", "parametrizations", "recompute", "seed", "_call_cache"}
)


class _CallCache:
    """Selected weights and analyses, cached per layer.

    They are not attributes of the layer, because Keras would track the variables in them.

    Attributes:
        targeted: Parametrized weights, each with its parametrization.
        targeted_from: Ids of the weights that `targeted` was selected from. They change if the
            layer gets new weights.
        given_patterns: The user's pattern of each pattern of the layer, if `tfwd.parametrize` has
            replaced the user's patterns by the weights' names.
        made_for: Training flags whose calls have created all weights of the layer. None stands for
            a tensor.
        analyses: Analyses of calls, by their keys.
    """

    def __init__(self) -> None:
        self.targeted: TargetedWeights = []
        self.targeted_from: tuple[int, ...] | None = None
        self.given_patterns: dict[str, str] = {}
        self.made_for: set[bool | None] = set()
        self.analyses: dict[Any, CallAnalysis] = {}


class WeightPerturbationMixin(_keras.layer_wrappers.NoAutographLayer):
    """Mixin for Keras layers that compute with functions of weights.

    A layer calls `_init_perturbation` in its constructor and `_perturbed_call` in its call. The
    weights belong to the layer itself, or to the layer that `_subject` returns.
    """

    parametrizations: Any  # Parametrizations
    seed: int | None
    recompute: bool
    _exclude: tuple[str, ...] = ()  # patterns of weights that are not selected
    addition_number: int | None = None  # of a parametrization in place

    def _init_perturbation(
        self,
        parametrizations: Parametrizations,
        seed: int | None,
        recompute: bool,
        share_across_replicas: bool = False,
        stream: int = 0,
    ) -> None:
        self.seed = checked_seed(seed)
        self.recompute = recompute
        self.draws = SeedStream(seed, share_across_replicas, stream)
        self.parametrizations = parametrizations
        self._call_cache = _CallCache()
        layer = self._subject()
        has_weights = _keras.layer_building.has_weights(layer)
        weight_selection.check_parametrizations(layer, parametrizations, rates=not has_weights)
        elements = weight_selection.elements(parametrizations)
        self.gains = Gains() if any(p.trains_reference for p in elements) else None
        self.references: References | None = None
        if any(p.has_reference for p in elements):
            self.references = References(self.name, self.gains)  # type: ignore[attr-defined]
        if has_weights:
            self._targeted()

    def set_weights(self, weights: Any) -> None:
        """Sets the weights. Warns if Mixout has already copied its references."""
        super().set_weights(weights)  # type: ignore[misc]
        with weight_setters.told():  # of the references of Mixout, and not of gains
            weight_change_listeners.tell(self.weights)  # type: ignore[attr-defined]

    @property
    def share_across_replicas(self) -> bool:
        """True if all replicas of a `tf.distribute` strategy draw the same."""
        return self.draws.share_across_replicas

    def _subject(self) -> Any:
        """Returns the layer whose weights are parametrized."""
        return self

    def _owner(self) -> Any:
        """Returns the layer that Keras calls: a wrapper, or the layer with a hook."""
        return self

    def _calls_subject(self) -> bool:
        """Returns True if no parametrization in place comes between this call and the subject's."""
        subject = self._subject()
        return subject is self or not method_hooks.is_hooked(subject)

    def _all_parametrizations(self) -> list[Parametrizations]:
        """Returns the parametrizations of this layer and of the layers inside it."""
        inside = _keras.layers.all_layers(self._owner())
        return [x.parametrizations for x in inside if isinstance(x, WeightPerturbationMixin)]

    def _unperturbed_call(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the training `call` on raw variables. Subclasses with their own `call` define it."""
        raise NotImplementedError

    def _targeted(self) -> TargetedWeights:
        """Returns the parametrized weights of the subject, which has weights."""
        layer, cache = self._subject(), self._call_cache
        weights = tuple(id(v) for v in layer.weights)
        if cache.targeted_from != weights:
            targeted = weight_selection.select(layer, self.parametrizations, self._exclude)
            for target, parametrization in targeted:
                where = f"weight '{target.name}' of layer '{layer.name}'"
                parametrization.check(where, tuple(target.variable.shape))
            per_example_call.check(layer, targeted)
            unsupported_weight_reads.check_normalized(
                layer, {id(t.variable): t.name for t, _ in targeted}
            )
            if self.references is not None:
                self.references.create(targeted)
            cache.targeted, cache.targeted_from = targeted, weights
        return cache.targeted

    def _perturbed_call(
        self,
        function: Callable[..., Any],
        args: tuple,
        kwargs: Mapping[str, Any],
        training: Any,
        unperturbed: Callable[..., Any] | None = None,
    ) -> Any:
        """Returns `function(*args, training=training, **kwargs)` on effective weights.

        Args:
            function: Call of the layer whose weights are parametrized.
            args: Positional arguments, tensors in any nest.
            kwargs: Keyword arguments, tensors in any nest.
            training: Training flag.
            unperturbed: Keras's own call. It runs if a training call changes no weight, for example
                at a rate of 0. Default None, if `function` is Keras's own call.
        """
        subject, flag = self._subject(), training_flag.standardize(training)
        if sampled := caller_detection.is_sampling():
            unperturbed = _under(unperturbed or function, flag)
            function, flag = _under(function, flag), True
        stochastic = all(p.stochastic for p in weight_selection.elements(self.parametrizations))
        if flag is False and stochastic:
            result = _on_raw_weights(function, args, kwargs, flag)
            if self._call_cache.targeted_from is None and _keras.layer_building.has_weights(
                subject
            ):
                self._targeted()  # the call has created the weights: reject a wrong pattern now
            return result
        targeted = [(t, p) for t, p in self._targeted() if not p.is_identity and _acts(p, flag)]
        if not targeted and flag is not False:
            self.draws.next(flag)  # a rate of 0 draws nothing, but the call counts
        if not targeted and isinstance(flag, bool):
            return _on_raw_weights(unperturbed or function, args, kwargs, flag)
        if not isinstance(flag, bool):
            kwargs = call_packing.with_mask_of_inputs(args, kwargs)
        is_lookup = keras_own_layers.is_plain(subject, keras.layers.Embedding, ours=subject is self)
        is_lookup = is_lookup and self._calls_subject()
        looks_up = is_lookup and embedding_lookup.is_possible(subject, targeted, args, kwargs)
        if looks_up:
            (ids,) = (*args, *kwargs.values())
            function, variables, args, kwargs = subject, subject.weights, (), {}
        else:
            own = id(self.draws.state)
            variables = [v for v in subject.variables if id(v) != own]
        name = self.name  # type: ignore[attr-defined]
        call = SubstitutedCall(
            name,
            self.draws,
            function,
            variables,
            targeted,
            args,
            kwargs,
            flag,
            self.references,
            self._begun_references(flag),
            self.addition_number,
        )
        if looks_up:
            rows = embedding_lookup.looked_up_rows(call, subject, ids)
            if self.addition_number is not None:
                # Keras's call of the layer attaches the mask, in both branches of a flag.
                _keras.layers.set_mask(rows, None)
            return rows
        return self._sampled_run(call) if sampled else self._perturbed_run(call)

    def _begun_references(self, training: bool | tf.Tensor) -> list[tf.Variable]:
        """Copies due references before a substitution. Returns all references in this layer."""
        owner = self._owner()
        if not outer_wrappers.present():
            reference_weights.copy_due_references(owner, training)
        return reference_weights.variables(owner)

    def _perturbed_run(self, call: SubstitutedCall) -> Any:
        """Makes the call, and passes its updates and losses to Keras."""
        name: str = self.name  # type: ignore[attr-defined]
        owner = self._owner()
        # Layers behave differently after they are frozen or unfrozen, or parametrized in place.
        flags = tuple(layer.trainable for layer in _keras.layers.all_layers(owner))
        key = (*call.analysis_key(), flags, tuple(map(id, method_hooks.links_in(owner))))
        analysis = self._call_cache.analyses.get(key)
        names = {id(target.variable): target.name for target, _ in call.targeted}
        if analysis is None:
            analysis = traced_call_analysis.analyse(name, owner, names, call)
        call.extend(analysis.extra)
        recompute = self.recompute and call.is_worth_recomputing()
        warned = recompute and bool(analysis.impure)
        recompute = recompute and not analysis.impure
        recompute = recompute and not (
            private_graph_apis.is_saving() or private_graph_apis.in_branch_of_loop()
        )
        again = recompute and call.runs_again()
        if again:
            recompute = again = not analysis.taken and keras_own_layers.is_keras_own(owner)
        before = AttributeSnapshot(owner) if again else None
        watch = contextlib.nullcontext() if analysis.seen else private_graph_apis.Accesses()
        with watch as accesses, unsupported_weight_reads.kept_tensors_explained(name):
            if isinstance(call.training, bool) and not recompute:
                result = call.run_directly(call.training)
            else:
                result = call.run(analysis, recompute, before)
        if accesses is not None:
            unsupported_weight_reads.check(
                name,
                names,
                filter(accesses.has, call.variables),
                unsupported_weight_reads.PAST_KERAS,
            )
        if key not in self._call_cache.analyses:
            self._call_cache.analyses[key] = analysis
            if warned:
                warnings.warn(
                    f"layer '{name}' cannot be run a second time in backward, because "
                    f"{analysis.impure}; it stores its effective weights for backward, as with "
                    "recompute=False",
                    stacklevel=2,
                )
        # Otherwise a custom gradient of Keras would keep the model forever.
        custom_gradient.hand_over_gradients()
        for loss in result.losses:
            _keras.layers.add_loss(owner, loss)
        stateless_call.assign(result.updates)
        return result.outputs

    def _check_has_weights(self) -> None:
        layer = self._subject()
        if not _keras.layer_building.has_weights(layer):
            lacking = ", or not all of them: call it" if layer.built else ": build it or call it"
            raise ValueError(f"layer '{layer.name}' has no weights yet{lacking} first")

    def _parametrized_weights(self) -> list[ParametrizedWeight]:
        """Returns the parametrized weights, each with the pattern that selected it.

        `tfwd.parametrizations.parametrized_layers` finds layers by this method.

        Raises:
            ValueError: If the layer has no weights yet.
        """
        self._check_has_weights()
        given = self._call_cache.given_patterns
        found = weight_selection.patterns(self._subject(), self.parametrizations, self._exclude)
        patterns = [pattern and given.get(pattern, pattern) for pattern in found]
        return [
            ParametrizedWeight(pattern, target, parametrization)
            for pattern, (target, parametrization) in zip(patterns, self._targeted(), strict=True)
        ]

    def _sampled_run(self, call: SubstitutedCall) -> Any:
        """Makes a call that needs no gradient. Its losses are discarded."""
        name: str = self.name  # type: ignore[attr-defined]
        owner = self._owner()
        names = {id(target.variable): target.name for target, _ in call.targeted}
        unsupported_weight_reads.check_calls(name, owner)
        with (
            private_graph_apis.Accesses() as accesses,
            unsupported_weight_reads.kept_tensors_explained(name),
        ):
            result = call.run_directly(True)
        unsupported_weight_reads.check(
            name, names, filter(accesses.has, call.variables), unsupported_weight_reads.PAST_KERAS
        )
        custom_gradient.hand_over_gradients()
        return result.outputs

    @property
    def calls(self) -> int | tf.Tensor:
        """Number of training calls so far. The next training call has this number."""
        return self.draws.calls

    def effective_weights(self, call: int, examples: int | None = None) -> dict[str, tf.Tensor]:
        """Returns the exact weights that a training call uses on replica 0.

        They are computed from the present raw weights. This assumes that each call of this layer
        also calls the inner wrappers that parametrize the same weights.

        Args:
            call: int. Number of the training call, from 0. `effective_weights(layer.calls)` returns
                the weights of the next training call.
            examples: int. Number of examples in the call's batch, if a weight has a mask for each
                example (`Dropout(per_example=True)`). Default None.

        Returns:
            dict from a weight's name to a tensor of its shape and dtype. The name is the shortest
            suffix of the weight's path that is unique in the layer. A weight with a mask for each
            example has an additional first axis of size `examples`.

        Raises:
            ValueError: If the layer has no weights yet. If a weight has a mask for each example,
                and `examples` is None.
        """
        self._check_has_weights()
        result = {}
        for target, bound in self._acting(call - self.calls):
            result[target.name] = per_example_call.effective_weight(
                self._subject(), target, bound, examples
            )
        return result

    def _present_targets(self) -> TargetedWeights:
        """Returns the parametrized weights, or an empty list if the layer has no weights yet."""
        return self._targeted() if _keras.layer_building.has_weights(self._subject()) else []

    def _acting(self, ahead: int | tf.Tensor) -> list[tuple[Target, list[BoundParametrization]]]:
        """Returns the parametrized weights, each with all parametrizations that act on it."""
        targets = [target for target, _ in self._targeted()]
        found = acting_parametrizations.acting(self, [t.variable for t in targets], ahead)
        return [(t, [bound for _, bound in found[id(t.variable)]]) for t in targets]

    def _evaluation_weights(self) -> list[tuple[Target, tf.Tensor]]:
        """Returns the parametrized weights, each with the value that evaluation uses."""
        found = []
        for target, acting in self._acting(0):
            bound = [one._replace(training=False) for one in acting]
            raw = _keras.variables.value(target.variable)
            found.append((target, chain.apply(raw, chain.per_example(bound)[0])))
        return found


def _on_raw_weights(
    function: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any], training: bool
) -> Any:
    with _keras.layer_calls.CallState().restored(training):
        return function(*args, training=training, **kwargs)


def _under(function: Callable[..., Any], flag: bool | tf.Tensor) -> Callable[..., Any]:
    """Returns a function that runs under a training flag, whichever flag it is called with."""

    def call(*args: Any, training: Any, **kwargs: Any) -> Any:
        return _on_raw_weights(function, args, kwargs, flag)

    return call


def _acts(parametrization: Parametrization, training: bool | tf.Tensor) -> bool:
    """Returns True if a parametrization may act under this training flag."""
    if training is False:
        return any(not element.stochastic for element in parametrization.elements())
    return True
