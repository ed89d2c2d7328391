"""`WeightPerturbationMixin`: base of all layers that compute with functions of their weights.

A training call takes a call number, computes each parametrized weight's effective value from its
raw value and a seed, and runs the layer with those values in place of the variables. Around that,
`tfwd._graph.recompute` keeps nothing but the arguments for backward. In eager mode, or under a
training flag that is a tensor, backward runs the layer a second time, if tfwd can prove that the
layer computes the same again (see `call_analysis` and `provable`). Other layers keep their
effective weights.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras, training_flag
from tfwd._graph import custom_gradient, graphs, substitute
from tfwd.layers._substitution import (
    call_analysis,
    lookup,
    overriding,
    provable,
    reads,
    references,
    weight_selection,
)
from tfwd.layers._substitution.attributes import Attributes
from tfwd.layers._substitution.references import References
from tfwd.layers._substitution.seed_stream import SeedStream, checked_seed
from tfwd.layers._substitution.substituted_call import CallAnalysis, SubstitutedCall, outer_wrappers
from tfwd.layers._substitution.weight_selection import Parametrizations, TargetedWeights
from tfwd.parametrizations import Parametrization, chain
from tfwd.parametrizations.chain import BoundParametrization
from tfwd.pretrained import listeners

# Attributes that a plain layer on the same variables does not have.
PERTURBATION_ATTRIBUTES = frozenset(
    {"draws", "references", "parametrizations", "recompute", "seed", "_known"}
)


class _Known:
    """What a layer has found out about itself.

    Not attributes of the layer: Keras would take the variables in them for the layer's own.

    Attributes:
        targeted: the parametrized weights, each with its parametrization.
        targeted_from: the ids of the weights that they were selected from, by which it shows when a
            layer has got new ones.
        made_for: the training flags, None for a tensor, for whose calls the layer is known to have
            made all its weights.
        analyses: what calls were seen to do.
    """

    def __init__(self) -> None:
        self.targeted: TargetedWeights = []
        self.targeted_from: tuple[int, ...] | None = None
        self.made_for: set[bool | None] = set()
        self.analyses: dict[Any, CallAnalysis] = {}


class WeightPerturbationMixin(_keras.layers.NoAutographLayer):
    """Mixin for Keras layers that compute with functions of weights.

    A layer calls `_init_perturbation` in its constructor and `_perturbed_call` in its call. The
    weights are its own, or those of the layer that it returns by `_subject`.
    """

    parametrizations: Any  # Parametrizations
    seed: int | None
    recompute: bool

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
        self._known = _Known()
        layer = self._subject()
        has_weights = _keras.layers.has_weights(layer)
        weight_selection.check_parametrizations(layer, parametrizations, rates=not has_weights)
        self.references: References | None = None
        if any(p.has_reference for p in weight_selection.elements(parametrizations)):
            self.references = References(self.name)  # type: ignore[attr-defined]
        if has_weights:
            self._targeted()

    def set_weights(self, weights: Any) -> None:
        """Sets the weights; warns if Mixout has taken its references already."""
        super().set_weights(weights)  # type: ignore[misc]
        listeners.tell(self.weights)  # type: ignore[attr-defined]

    @property
    def share_across_replicas(self) -> bool:
        """Whether all replicas of a `tf.distribute` strategy draw alike."""
        return self.draws.share_across_replicas

    def _subject(self) -> Any:
        """The layer whose weights are parametrized."""
        return self

    def _unperturbed_call(self, *args: Any, **kwargs: Any) -> Any:
        """`call` in training, on the variables as they are; a class with another `call` has one."""
        raise NotImplementedError

    def _targeted(self) -> TargetedWeights:
        """The parametrized weights of the subject, which has weights."""
        layer, known = self._subject(), self._known
        weights = tuple(id(v) for v in layer.weights)
        if known.targeted_from != weights:
            targeted = weight_selection.select(layer, self.parametrizations)
            for target, parametrization in targeted:
                where = f"weight '{target.name}' of layer '{layer.name}'"
                parametrization.check(where, tuple(target.variable.shape))
            reads.check_normalized(layer, {id(t.variable): t.name for t, _ in targeted})
            if self.references is not None:
                self.references.make(targeted)
            known.targeted, known.targeted_from = targeted, weights
        return known.targeted

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
            function: the call of the layer whose weights are parametrized.
            args, kwargs: the arguments, tensors in any nest.
            training: the training flag.
            unperturbed: Keras's own call, for a training call that leaves all weights as they
                are, such as one at a rate of 0. None if `function` is Keras's own call.
        """
        subject, flag = self._subject(), training_flag.standardize(training)
        stochastic = all(p.stochastic for p in weight_selection.elements(self.parametrizations))
        if flag is False and stochastic:
            result = _on_raw_weights(function, args, kwargs, flag)
            if self._known.targeted_from is None and _keras.layers.has_weights(subject):
                self._targeted()  # the call has made the weights: a wrong pattern shows now
            return result
        targeted = [(t, p) for t, p in self._targeted() if not p.is_identity and _acts(p, flag)]
        if not targeted and flag is not False:
            self.draws.next(flag)  # a rate of 0 draws nothing, and the call counts all the same
        if not targeted and isinstance(flag, bool):
            return _on_raw_weights(unperturbed or function, args, kwargs, flag)
        is_lookup = overriding.is_plain(subject, keras.layers.Embedding, ours=subject is self)
        looks_up = is_lookup and lookup.applies(subject, targeted, args, kwargs)
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
        )
        return lookup.rows(call, subject, ids) if looks_up else self._perturbed_run(call)

    def _begun_references(self, training: bool | tf.Tensor) -> list[tf.Variable]:
        """The references of this layer and of those in it, taken before anything is substituted."""
        owner: Any = self
        if not outer_wrappers():
            references.begin(owner, training)
        return references.variables(owner)

    def _perturbed_run(self, call: SubstitutedCall) -> Any:
        """Makes the call, and has Keras make the updates and take the losses that came of it."""
        name: str = self.name  # type: ignore[attr-defined]
        owner: Any = self
        # Layers that are frozen or set free behave otherwise from then on.
        key = (*call.key(), tuple(layer.trainable for layer in _keras.layers.all_layers(owner)))
        analysis = self._known.analyses.get(key)
        names = {id(target.variable): target.name for target, _ in call.targeted}
        if analysis is None:
            analysis = call_analysis.analyse(name, owner, names, call)
        call.extend(analysis.extra)
        recompute = self.recompute and call.is_worth_recomputing()
        warned = recompute and bool(analysis.impure)
        recompute = recompute and not analysis.impure
        recompute = recompute and not (graphs.is_saving() or graphs.in_branch_of_loop())
        again = recompute and call.runs_again()
        if again:
            recompute = again = not analysis.taken and provable.is_keras_own(owner)
        before = Attributes(owner) if again else None
        watch = contextlib.nullcontext() if analysis.seen else graphs.Accesses()
        with watch as accesses, reads.kept_tensors_explained(name):
            if isinstance(call.training, bool) and not recompute:
                result = call.run_once(call.training)
            else:
                result = call.run(analysis, recompute, before)
        if accesses is not None:
            reads.check(name, names, filter(accesses.has, call.variables), reads.PAST_KERAS)
        if key not in self._known.analyses:
            self._known.analyses[key] = analysis
            if warned:
                warnings.warn(
                    f"layer '{name}' cannot be run a second time in backward, because "
                    f"{analysis.impure}; it keeps its effective weights until then, as with "
                    "recompute=False",
                    stacklevel=2,
                )
        custom_gradient.follow()  # or a gradient of Keras's own would keep the model for good
        for loss in result.losses:
            _keras.layers.add_loss(owner, loss)
        substitute.assign(result.updates)
        return result.outputs

    @property
    def calls(self) -> int | tf.Tensor:
        """How many training calls there were; the next one has this number."""
        return self.draws.calls

    def effective_weights(self, call: int) -> dict[str, tf.Tensor]:
        """The very weights that a training call uses on replica 0.

        They follow from the raw weights as they are now. Wrappers inside this one that parametrize
        the same weights are taken to have been called whenever this one was.

        Args:
            call: the number of the training call, from 0: `effective_weights(layer.calls)` are the
                weights of the next one.

        Returns:
            dict from a weight's name, the shortest end of its path that is unique in the layer, to
            a tensor of its shape and dtype.

        Raises:
            ValueError: if the layer has no weights yet.
        """
        layer = self._subject()
        if not _keras.layers.has_weights(layer):
            lacking = ", or not all of them: call it" if layer.built else ": build it or call it"
            raise ValueError(f"layer '{layer.name}' has no weights yet{lacking} first")
        result = {}
        for target, _ in self._targeted():
            bound = _bound(self, target.variable, call - self.calls)
            result[target.name] = chain.apply(_keras.variables.value(target.variable), bound)
        return result


def _on_raw_weights(
    function: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any], training: bool
) -> Any:
    with _keras.layers.CallState().restored(training):
        return function(*args, training=training, **kwargs)


def _acts(parametrization: Parametrization, training: bool | tf.Tensor) -> bool:
    """Whether a parametrization may do anything under this flag."""
    if training is False:
        return any(not element.stochastic for element in parametrization.elements())
    return True


def _bound(
    layer: Any, variable: keras.Variable, ahead: int | tf.Tensor
) -> list[BoundParametrization]:
    """What a layer and those inside it do to a variable `ahead` calls from now, in order."""
    inside = _keras.layers.sublayers(layer)
    found = [bound for inner in inside for bound in _bound(inner, variable, ahead)]
    if isinstance(layer, WeightPerturbationMixin) and _keras.layers.has_weights(layer._subject()):
        number = tf.cast(ahead + layer.calls, tf.int64)
        for target, parametrization in layer._targeted():
            if target.variable is variable and not parametrization.is_identity:
                seed = layer.draws.seed_at(number, target.position)
                held = layer.references
                values = held.looked_up(target, parametrization) if held is not None else ()
                found.append(BoundParametrization(parametrization.at(number), seed, True, values))
    return found
