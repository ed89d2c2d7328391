"""`Pass`: a forward pass that records every use of every weight; `Call`: what a rule is given.

A layer with a rule is run by the rule. It reads its weights with the gradient stopped, so that the
tape computes no gradient of a weight, and marks probes: tensors whose gradients are wanted. Any
other read of a weight, by a layer without a rule, by a model's own code or past Keras, is noticed.
Such a weight is computed the general way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._graph import graphs
from tfwd._keras import calls as _keras_calls
from tfwd.gradients.per_example_gradients import PerExampleGradient
from tfwd.gradients.perturbations import Perturbations, plain_call
from tfwd.gradients.rules import registry
from tfwd.layers._substitution.weight_perturbation import WeightPerturbationMixin


class Use(NamedTuple):
    """One use of a weight.

    Attributes:
        method: the rule's name.
        probes: the numbers of the probes whose gradients `term` takes.
        term: from these gradients to the weight's per-example gradients.
        scale: the derivative of the effective weight that was used, None if it was the weight.
    """

    method: str
    probes: tuple[int, ...]
    term: Callable[..., PerExampleGradient]
    scale: tf.Tensor | None


class Pass:
    """A forward pass. Use it as a context around the model's call; the tape stays open inside.

    Args:
        model: a built Keras model.
        perturbations: the draws, the same for all passes of one computation.
        rules: whether rules are used. Without, the model runs as it is, save for the draws.
        draws: those of an earlier pass over the same inputs, which this one is to see again.
        values: by the weights' ids, what the model is run on in place of them, for a trial.
            With rules, the tape then watches the weights too, for `unaccounted`.

    Attributes:
        uses: by the weights' ids, their uses.
        general: ids of weights that have to be computed the general way.
        losses: what `add_loss` was given.
        before: what was updated, other than the draws of tfwd's layers, such as the state of a
            dropout's generator: by ids, the variable and its value before.
        scalars: whether there are losses that are not of an example.
        draws: what layers drew past the variables that Keras sees.
        probes: the probes in the order of their numbers.
        numbers: their numbers by their ids.
        inside: whether a weight was read in a function that was traced during the pass. There the
            weights are themselves, since the function may outlive the pass.
    """

    def __init__(
        self,
        model: keras.Model,
        perturbations: Perturbations,
        rules: bool = True,
        values: dict[int, tf.Tensor] | None = None,
        draws: _keras_calls.Draws | None = None,
    ) -> None:
        self.model, self.perturbations = model, perturbations
        self.variables = {id(v): v for v in model.trainable_variables}
        self.uses: dict[int, list[Use]] = {}
        self.general: set[int] = set()
        self.rules = rules
        self.losses: list[tf.Tensor] = []
        self.before: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self.scalars = self.inside = False
        self.probes: list[tf.Tensor] = []
        self.numbers: dict[int, int] = {}
        self.tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        self.draws = _keras_calls.Draws() if draws is None else draws
        self._again = draws is not None
        self._ruled = 0
        self._given = values
        self._values: dict[int, tf.Tensor] = {}
        self._scales: dict[int, tf.Tensor | None] = {}

    def run(self, x: Any, training: bool) -> Any:
        """Returns the model's outputs, recorded. To be called with the tape open."""
        self._graph = _keras.present_graph()
        self._values = {key: _keras.variables.value(v) for key, v in self.variables.items()}
        if self._given is not None:
            self._values.update(self._given)
        if self._given is not None and self.rules:
            for key, variable in self.variables.items():
                self.tape.watch([self._values[key], *_keras.variables.tf_variables(variable)])
        layers = _keras.layers.all_layers(self.model)
        owners = [owner for layer in layers for owner in registry.owners(type(layer))]
        owners += [
            _keras_calls.calls_of(type(x)) for x in layers if isinstance(x, WeightPerturbationMixin)
        ]
        self.perturbations.begin()
        with (
            _keras_calls.intercepted(owners, self._handle),
            self._observed([]),
            graphs.Accesses() as accesses,
            self.draws.replayed() if self._again else self.draws.recorded(),
            _keras_calls.users_code(),
        ):
            outputs = self.model(x, training=training)
        for key, variable in self.variables.items():
            if accesses.has(variable):
                self.general.add(key)
        return outputs

    def unaccounted(self, target: tf.Tensor) -> set[int]:
        """Ids of weights whose gradients do not all come by rules.

        A rule reads its weights with the gradient stopped. So if the tape finds a way from the
        weight itself to the target, something else uses it, be it by a function that was traced
        before, in which no read shows.
        """
        sources = [
            [self._values[key], *_keras.variables.tf_variables(variable)]
            for key, variable in self.variables.items()
        ]
        gradients = self.tape.gradient(target, sources)  # of all at once: one pass
        found = {
            key
            for key, of_weight in zip(self.variables, gradients, strict=True)
            if any(gradient is not None for gradient in of_weight)
        }
        return found | self.general

    def _observed(self, values: list[tuple[keras.Variable, tf.Tensor]]) -> _keras_calls.Observed:
        return _keras_calls.Observed(values, self._read, self._update, self.losses.append)

    def _read(self, variable: keras.Variable) -> tf.Tensor | None:
        key = id(variable)
        if key not in self.variables:
            return None
        if not self._ruled:
            self.general.add(key)
        if _keras.present_graph() is not self._graph:
            self.inside = True
            return None
        return self._values[key] if self.rules or self._given is not None else None

    def _update(self, variable: keras.Variable) -> None:
        if not self._ruled:
            self.before.setdefault(id(variable), (variable, _keras.variables.value(variable)))

    def _handle(
        self,
        owner: type,
        layer: keras.Layer,
        original: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        if _keras.present_graph() is not self._graph or _keras_calls.is_rematerialized(layer):
            return original(*args, **kwargs)
        if isinstance(layer, WeightPerturbationMixin):
            plain = plain_call(owner, layer, original, args, kwargs)
            if plain is not None:
                return self._perturbed(layer, plain)
        function = registry.find(type(layer), owner)
        ours = [v for v in layer.trainable_variables if id(v) in self.variables]
        ragged = any(isinstance(t, tf.RaggedTensor) for t in tf.nest.flatten((args, kwargs)))
        if function is None or not ours or not self.rules or ragged:
            return original(*args, **kwargs)
        call = Call(self, layer, function.__name__, original)
        result = function(layer, call, *args, **kwargs)
        if result is NotImplemented:
            return original(*args, **kwargs)
        for key, use in call.uses:
            self.uses.setdefault(key, []).append(use)
        return result

    def _perturbed(self, layer: WeightPerturbationMixin, plain: Callable[[], Any]) -> Any:
        """Runs a layer of tfwd on its effective weights of this pass."""
        with self.ruled():
            found = self.perturbations.take(layer, differentiable=not self.rules)
        given, before = [], dict(self._scales)
        for variable, value, scale in found:
            key = id(variable)
            if key in before:  # a layer around this one has applied the whole chain already
                continue
            given.append((variable, value))
            self._scales[key] = scale
            if scale is None:
                self.general.add(key)
        try:
            with self._observed(given):
                return plain()
        finally:
            self._scales = before

    @contextmanager
    def ruled(self) -> Iterator[None]:
        """Returns a context in which reads of weights are a rule's, and do not make a weight general."""
        self._ruled += 1
        try:
            yield
        finally:
            self._ruled -= 1


class Call:
    """What a rule is given beside the layer and the arguments of its call."""

    def __init__(
        self, recorder: Pass, layer: keras.Layer, method: str, original: Callable[..., Any]
    ) -> None:
        self._pass, self._layer, self._method = recorder, layer, method
        self._original = original
        self.uses: list[tuple[int, Use]] = []

    def value(self, variable: keras.Variable) -> tf.Tensor:
        """What the layer computes with in place of the variable, without a gradient to it.

        It has the layer's compute dtype, and is the effective weight under weight dropout.
        """
        with self._pass.ruled():
            return tf.stop_gradient(_keras.variables.read(variable))

    def probe(self, tensor: tf.Tensor) -> tf.Tensor:
        """Marks a tensor whose gradient is wanted. What is returned must be computed on with."""
        probe = tf.identity(tensor)
        self._pass.tape.watch(probe)
        self._pass.numbers[id(probe)] = len(self._pass.probes)
        self._pass.probes.append(probe)
        return probe

    def use(
        self,
        variable: keras.Variable | None,
        probes: tf.Tensor | tuple[tf.Tensor, ...],
        term: Callable[..., PerExampleGradient],
    ) -> None:
        """Says what the per-example gradients of a weight by this use are.

        Args:
            variable: the weight; None and what is not trained are ignored.
            probes: one or several results of `probe`.
            term: called with the gradients of the sum of the examples' losses with respect to the
                probes; returns the `PerExampleGradient` of this use, of the weight's shape: an
                `OuterProduct`, `Rows`, `Materialized` or one of your own.

        Raises:
            ValueError: if something else is given than what `probe` returned.
        """
        key = id(None if variable is None else _keras.variables.original(variable))
        if key not in self._pass.variables:
            return
        wanted = probes if isinstance(probes, tuple) else (probes,)
        numbers = self._pass.numbers
        if not all(id(probe) in numbers for probe in wanted):
            raise ValueError(
                f"the rule '{self._method}' of layer '{self._layer.name}' gives call.use a tensor "
                f"for the weight '{_keras.variables.path(variable)}' that call.probe did not "
                "return: compute on with what probe returned, and give that to call.use"
            )
        found = tuple(numbers[id(probe)] for probe in wanted)
        self.uses.append((key, Use(self._method, found, term, self._pass._scales.get(key))))

    def original(
        self,
        *args: Any,
        values: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
        **kwargs: Any,
    ) -> Any:
        """Returns the layer's own call, with tensors in place of some of its weights.

        It is for weights that the rule accounts for by itself: their reads are not noticed.
        """
        given = [(_keras.variables.original(variable), tensor) for variable, tensor in values]
        with self._pass.ruled(), self._pass._observed(given):
            return self._original(*args, **kwargs)
