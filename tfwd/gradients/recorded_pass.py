"""`Pass`: a forward pass that records every use of every weight; `Call`: an argument of rules.

If a layer has a rule, the rule runs instead of the layer. The rule reads the weights with the
gradient stopped, so that the tape computes no gradient of a weight. It marks probes: tensors whose
gradients are needed. All other reads of a weight are detected: by a layer without a rule, by custom
code of the model, or without Keras. The moments of such a weight are computed example by example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._graph import private_graph_apis
from tfwd._keras import call_interception
from tfwd.gradients.effective_weights import Perturbations, plain_call
from tfwd.gradients.gradient_forms import PerExampleGradient
from tfwd.gradients.rules import registry
from tfwd.layers._substitution.in_place import draw_replay
from tfwd.layers._substitution.in_place.layer_call import Link
from tfwd.layers._substitution.in_place.parametrization_in_place import InPlace
from tfwd.layers._substitution.trainable_gains import Gains
from tfwd.layers._substitution.weight_perturbation_mixin import WeightPerturbationMixin


class Use(NamedTuple):
    """One use of a weight.

    Attributes:
        method: Name of the rule.
        probes: Numbers of the probes whose gradients are the arguments of `term`.
        term: Function from these gradients to the weight's per-example gradients.
        scale: Derivative of the effective weight that was used, or None if it was the raw weight.
    """

    method: str
    probes: tuple[int, ...]
    term: Callable[..., PerExampleGradient]
    scale: tf.Tensor | None


class Pass:
    """Forward pass that records uses of weights. Its tape must be open around `run`.

    Args:
        model: Built Keras model.
        perturbations: Draws, the same for all passes of one computation.
        rules: bool. Uses rules. If False, the model runs unchanged except for the draws. Default
            True.
        values: dict from a weight's id to a tensor that replaces the weight, for a trial. With
            rules, the tape then also watches the weights, for `unaccounted`. Default None.
        draws: Draws of an earlier pass over the same inputs, to repeat. Default None.

    Attributes:
        uses: dict from a weight's id to its uses.
        general: Ids of weights that no rule can cover.
        losses: Losses from `add_loss`.
        before: dict from an id to a variable and its earlier value. It has the updated variables,
            except the draws of tfwd's layers. An example is the state of a dropout's generator.
        scalars: bool. True if there are losses that belong to no example.
        draws: Draws of layers whose random state is not a variable.
        probes: Probes in the order of their numbers.
        numbers: Numbers of the probes, by their ids.
        inside: bool. True if a weight was read in a function that was traced during the pass. There
            the weights are not replaced, because the function may exist longer than the pass.
    """

    def __init__(
        self,
        model: keras.Model,
        perturbations: Perturbations,
        rules: bool = True,
        values: dict[int, tf.Tensor] | None = None,
        draws: call_interception.DrawRecording | None = None,
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
        self.draws = call_interception.DrawRecording() if draws is None else draws
        self._again = draws is not None
        self._ruled = 0
        self._given = values
        self._values: dict[int, tf.Tensor] = {}
        self._scales: dict[int, tf.Tensor | None] = {}

    def run(self, x: Any, training: bool) -> Any:
        """Runs the model and records it. Returns the outputs. The tape must be open."""
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
            _keras.calls_of(type(x)) for x in layers if isinstance(x, WeightPerturbationMixin)
        ]
        self.perturbations.begin()
        with (
            call_interception.intercepted(owners, self._handle),
            draw_replay.replaying(self),
            self._observed([]),
            private_graph_apis.Accesses() as accesses,
            self.draws.replayed() if self._again else self.draws.recorded(),
            call_interception.users_code(),
        ):
            outputs = self.model(x, training=training)
        for key, variable in self.variables.items():
            if accesses.has(variable):
                self.general.add(key)
        return outputs

    def unaccounted(self, target: tf.Tensor) -> set[int]:
        """Returns the ids of weights whose gradients do not all come from rules.

        A rule reads its weights with the gradient stopped. So if the tape finds a path from the
        weight itself to the target, something else uses the weight. This also finds functions that
        were traced before, whose reads are not visible.
        """
        sources = [
            [self._values[key], *_keras.variables.tf_variables(variable)]
            for key, variable in self.variables.items()
        ]
        gradients = self.tape.gradient(target, sources)  # one pass for all weights
        found = {
            key
            for key, of_weight in zip(self.variables, gradients, strict=True)
            if any(gradient is not None for gradient in of_weight)
        }
        return found | self.general

    def _observed(
        self, values: list[tuple[keras.Variable, tf.Tensor]]
    ) -> call_interception.Observed:
        return call_interception.Observed(values, self._read, self._update, self.losses.append)

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
        if _keras.present_graph() is not self._graph or call_interception.is_rematerialized(layer):
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

    def state(self, owner: InPlace, draw: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns the number of a call of parametrizations in place. It is equal in all passes."""
        return self.perturbations.state(owner, draw)

    def call(self, link: Link, plain: Callable[[], Any]) -> Any:
        """Runs a layer that is parametrized in place, on its effective weights of this pass."""
        return self._perturbed(link, plain)

    def _perturbed(self, layer: WeightPerturbationMixin, plain: Callable[[], Any]) -> Any:
        """Runs a layer of tfwd on its effective weights of this pass."""
        with self.ruled():
            found = self.perturbations.take(layer, differentiable=not self.rules)
        given, before = [], dict(self._scales)
        for variable, value, scale in found:
            key = id(variable)
            if key in before:  # an outer layer has already applied all parametrizations
                continue
            given.append((variable, value))
            self._scales[key] = scale
            if scale is None:
                self.general.add(key)
        # The weights of a parametrization, such as a gain, were read above.
        inside = [x for x in _keras.layers.all_layers(layer._owner()) if isinstance(x, Gains)]
        self.general.update(id(weight) for gains in inside for weight in gains.weights)
        try:
            with self._observed(given):
                return plain()
        finally:
            self._scales = before

    @contextmanager
    def ruled(self) -> Iterator[None]:
        """Marks reads of weights in the body as reads of a rule."""
        self._ruled += 1
        try:
            yield
        finally:
            self._ruled -= 1


class Call:
    """Second argument of a rule: reads weights, and declares their per-example gradients."""

    def __init__(
        self, recorder: Pass, layer: keras.Layer, method: str, original: Callable[..., Any]
    ) -> None:
        self._pass, self._layer, self._method = recorder, layer, method
        self._original = original
        self.uses: list[tuple[int, Use]] = []

    def value(self, variable: keras.Variable) -> tf.Tensor:
        """Returns the layer's value of a variable, without a gradient to the variable.

        It has the layer's compute dtype. Under weight dropout it is the effective weight.
        """
        with self._pass.ruled():
            return tf.stop_gradient(_keras.variables.read(variable))

    def probe(self, tensor: tf.Tensor) -> tf.Tensor:
        """Marks a tensor whose gradient is needed. The rule must use the returned tensor."""
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
        """Declares the per-example gradients of a weight in this use.

        Args:
            variable: Weight. None and untrained variables are ignored.
            probes: One or several results of `probe`.
            term: Function of the gradients of the sum of the examples' losses with respect to the
                probes. It returns the `PerExampleGradient` of this use, of the weight's shape: an
                `OuterProduct`, `Rows`, `Materialized` or a custom class.

        Raises:
            ValueError: If `probes` are not results of `probe`.
        """
        key = id(None if variable is None else _keras.variables.original(variable))
        if key not in self._pass.variables:
            return
        marked = probes if isinstance(probes, tuple) else (probes,)
        numbers = self._pass.numbers
        if not all(id(probe) in numbers for probe in marked):
            raise ValueError(
                f"the rule '{self._method}' of layer '{self._layer.name}' passes a tensor to "
                f"call.use for the weight '{_keras.variables.path(variable)}', but call.probe "
                "did not return this tensor: compute with the result of call.probe, and pass it "
                "to call.use"
            )
        found = tuple(numbers[id(probe)] for probe in marked)
        self.uses.append((key, Use(self._method, found, term, self._pass._scales.get(key))))

    def original(
        self,
        *args: Any,
        values: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
        **kwargs: Any,
    ) -> Any:
        """Runs the layer's own call, with tensors in place of some of its weights.

        Use it for weights that the rule covers: their reads are not recorded.
        """
        given = [(_keras.variables.original(variable), tensor) for variable, tensor in values]
        with self._pass.ruled(), self._pass._observed(given):
            return self._original(*args, **kwargs)
