"""What every layer that perturbs weights has: a seed, a call counter, and its effective weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras, parametrizations, training_flag
from tfwd.layers import lookup, overriding, weight_selection
from tfwd.layers.perturbed import Perturber, TargetedWeights, acts
from tfwd.layers.seed_stream import SeedStream, checked_seed
from tfwd.parametrizations import BoundParametrization, Parametrization

# Attributes that a plain layer on the same variables does not have.
PERTURBATION_ATTRIBUTES = frozenset(
    {"draws", "recompute", "seed", "share_across_replicas", "_parametrization", "_perturber"}
)


class WeightPerturbationMixin(_keras.layers.NoAutographLayer):
    """Mixin for Keras layers that compute with functions of weights.

    A layer calls `_init_perturbing` in its constructor and `_perturbed_call` in its call, and says
    by `_subject`, `_patterns` and `_select` which weights of which layer are meant.
    """

    seed: int | None
    recompute: bool
    share_across_replicas: bool

    def _init_perturbing(
        self,
        seed: int | None,
        recompute: bool,
        share_across_replicas: bool = False,
        stream: int = 0,
    ) -> None:
        self.seed = checked_seed(seed)
        self.recompute = recompute
        self.share_across_replicas = share_across_replicas
        self.draws = SeedStream(seed, share_across_replicas, stream)
        self._perturber = Perturber(self.name, self.draws)  # type: ignore[attr-defined]

    def _subject(self) -> keras.Layer:
        """The layer whose weights are parametrized."""
        raise NotImplementedError

    def _patterns(self) -> dict[str, Parametrization]:
        """What was asked for, by pattern or description: for checks before there are weights."""
        raise NotImplementedError

    def _select(self) -> TargetedWeights:
        """The parametrized weights of the subject, which is built."""
        raise NotImplementedError

    def _is_lookup(self) -> bool:
        """Whether a call does what `keras.layers.Embedding` does, and nothing else."""
        subject = self._subject()
        return overriding.is_plain(subject, keras.layers.Embedding, ours=subject is self)

    def _check_early(self) -> None:
        """Checks in the constructor what can be checked, with the weights' names if it is built."""
        layer = self._subject()
        for pattern, parametrization in self._patterns().items():
            where = f"weight '{pattern}' of layer '{layer.name}'"
            if not isinstance(parametrization, Parametrization):
                raise ValueError(
                    f"{where}: a parametrization such as Dropout(0.5) is wanted; "
                    f"got {parametrization!r}"
                )
            if not _keras.layers.has_weights(layer):
                parametrization.check(where)
        if _keras.layers.has_weights(layer):
            self._chosen()

    def _chosen(self) -> TargetedWeights:
        layer = self._subject()
        weights = tuple(id(v) for v in layer.weights)
        if self._perturber.chosen_from != weights:
            chosen = self._select()
            for target, parametrization in chosen:
                weight_selection.check_floating(layer, target)
                where = f"weight '{target.name}' of layer '{layer.name}'"
                parametrization.check(where, tuple(target.variable.shape))
            # Not an attribute of the layer: Keras would take the variables for the layer's own.
            self._perturber.chosen, self._perturber.chosen_from = chosen, weights
        return self._perturber.chosen

    def _perturbed_call(
        self,
        function: Callable[..., Any],
        args: tuple,
        kwargs: Mapping[str, Any],
        training: Any,
    ) -> Any:
        flag = training_flag.standardize(training)
        if isinstance(flag, bool) and not any(
            acts(parametrization, flag) for parametrization in self._patterns().values()
        ):
            result = self._perturber.run_plain(function, args, kwargs, flag)
            if self._perturber.chosen_from is None and _keras.layers.has_weights(self._subject()):
                self._chosen()  # the call has made the weights: a wrong pattern shows now
            return result
        own = id(self.draws.state)
        variables = [v for v in self._subject().variables if id(v) != own]
        chosen = self._chosen()
        acting = any(not p.is_identity for _, p in chosen)
        if acting and self._is_lookup() and lookup.applies(self._subject(), chosen, args, kwargs):
            (ids,) = (*args, *kwargs.values())
            return self._perturber.look_up(self._subject(), chosen, ids, flag)
        return self._perturber.run(
            self, function, variables, chosen, args, kwargs, flag, self.recompute
        )

    @property
    def calls(self) -> int | tf.Tensor:
        """How many training calls have drawn; the next one has this number."""
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
        for target, _ in self._chosen():
            chain = _chain(self, target.variable, call - self.calls)
            result[target.name] = parametrizations.apply(
                _keras.variables.value(target.variable), chain
            )
        return result


def _chain(
    layer: Any, variable: keras.Variable, ahead: int | tf.Tensor
) -> list[BoundParametrization]:
    """The links that a layer and those inside it put on a variable `ahead` calls from now."""
    links = [
        link for inner in _keras.layers.sublayers(layer) for link in _chain(inner, variable, ahead)
    ]
    if isinstance(layer, WeightPerturbationMixin) and _keras.layers.has_weights(layer._subject()):
        number = tf.cast(ahead + layer.calls, tf.int64)
        for target, parametrization in layer._chosen():
            if target.variable is variable and not parametrization.is_identity:
                seed = layer.draws.seed_at(number, target.position)
                links.append(BoundParametrization(parametrization.at(number), seed))
    return links
