"""The oracle: a plain copy of the model, run in eager mode on weights that are computed by hand.

A layer that is wrapped in the other model reads `a w + b` here, a tensor for each call. The tape
returns the loss's derivative with respect to these tensors. The raw weight's derivative is the sum
of these derivatives times `a` over the calls, plus the derivative of direct reads of the raw
weight. This module does not use tfwd.
"""

import numpy as np
import tensorflow as tf

from fuzz import model_inputs, training_modes
from fuzz.given_weights import feed, flatten, states, tensor_of


class Oracle:
    """The plain model, run on effective weights.

    Args:
        model: the plain model, built.
        drawn: for the name of each wrapped layer, for each of its calls, a dict from an index of a
            weight to `(a, b)`.
    """

    def __init__(self, model, drawn):
        self.model = model
        self.drawn = drawn
        self.feeds = True
        self.tape = None
        self.fed = []  # in the present step: a variable, its factor, the tensor that was read
        self.calls = {}
        for layer in flatten(model):
            if layer.name in drawn:
                feed(layer, lambda layer=layer: self._values(layer))

    def restart(self, start):
        """Goes back to the first call, with these raw weights."""
        self.calls = dict.fromkeys(self.drawn, 0)
        model_inputs.set_weights(self.model, start)

    def _values(self, layer):
        if not self.feeds:
            return []
        number = self.calls[layer.name]
        self.calls[layer.name] += 1
        pairs = []
        for index, (a, b) in self.drawn[layer.name][number].items():
            variable = layer.weights[index]
            raw = np.asarray(variable, np.float64)
            tensor = tf.cast(a * raw + b, variable.dtype)
            if self.tape is not None:
                self.tape.watch(tensor)
            self.fed.append((variable, a, tensor))
            pairs.append((variable, tensor))
        return pairs

    def forward(self, letters, inputs, targets, loss):
        """Returns the outputs and the loss; `loss` is "mean" or the loss of "fit"."""
        self.fed = []
        outputs = training_modes.call(self.model, letters, inputs, True)
        if loss == "fit":
            return outputs, training_modes.keras_loss(self.model, inputs, targets, outputs)
        return outputs, training_modes.loss_of(self.model, outputs, targets)

    def step(self, letters, inputs, targets, loss):
        """Returns outputs, loss, and the gradients of inputs and raw weights."""
        floats = [x for x in inputs if x.dtype.is_floating]
        with tf.GradientTape() as self.tape:
            self.tape.watch(floats)
            outputs, value = self.forward(letters, inputs, targets, loss)
        trained = list(self.model.trainable_variables)
        variables = [tensor_of(v) for v in trained]
        effective = [tensor for _, _, tensor in self.fed]
        sources = floats + variables + effective
        found = self.tape.gradient(value, sources)
        self.tape = None
        found = [training_modes.dense(g, s).numpy() for g, s in zip(found, sources, strict=True)]
        found = [g.astype(np.float64) for g in found]
        of_inputs, of_weights = found[: len(floats)], found[len(floats) :]
        totals = dict(zip(map(id, trained), of_weights, strict=False))
        of_effective = of_weights[len(variables) :]
        for (variable, a, _), gradient in zip(self.fed, of_effective, strict=True):
            if id(variable) in totals:
                totals[id(variable)] = totals[id(variable)] + a * gradient
        self.dtypes = [t.dtype.name for t in model_inputs.flat(outputs)]
        outputs = training_modes.values(model_inputs.flat(outputs))
        return outputs, float(value), of_inputs, [totals[id(v)] for v in trained]

    def slope(self, letters, inputs, targets, loss, gradients, size=1e-6):
        """Returns the loss's slope along a random direction, by differences and by gradients."""
        rng = np.random.default_rng(5)
        trained = list(self.model.trainable_variables)
        ways = [rng.normal(size=tuple(v.shape)) for v in trained]
        before = training_modes.values(trained)
        kept = [(v, np.asarray(v)) for v in [*self.model.weights, *states(self.model)]]
        calls, found = dict(self.calls), []
        for sign in (1, -1):
            for variable, value in kept:
                variable.assign(value)
            for variable, value, way in zip(trained, before, ways, strict=True):
                variable.assign(value + sign * size * way)
            found.append(float(self.forward(letters, inputs, targets, loss)[1]))
            self.calls = dict(calls)
        for variable, value in kept:
            variable.assign(value)
        by_gradients = sum(np.sum(g * w) for g, w in zip(gradients, ways, strict=True))
        return (found[0] - found[1]) / (2 * size), float(by_gradients)

    def run(self, letters, shapes, mode, replica, untaped=False):
        """Makes two steps, recorded as `modes.run` and `modes.in_replicas` do it."""
        record = training_modes.Record(training_modes.values(self.model.weights))
        loss = "fit" if mode.run.startswith("fit") else "mean"
        if loss == "fit":
            self.model.compile(loss="mse", optimizer="sgd")
        slopes = []
        if untaped:
            self.forward(
                letters, model_inputs.inputs(letters, 0), model_inputs.targets(shapes, 0), loss
            )
        for number in range(training_modes.STEPS):
            place = 10 * replica + number
            given = model_inputs.inputs(letters, place), model_inputs.targets(shapes, place)
            if number == 0 and mode.slope and mode.policy == "float64":
                slopes.append((given, dict(self.calls)))
                outside = [(v, np.asarray(v)) for v in [*self.model.weights, *states(self.model)]]
            outputs, value, of_inputs, of_weights = self.step(letters, *given, loss)
            if slopes and number == 0:
                record.slope = self._slope_before(outside, slopes[0], letters, loss, of_weights)
            record.dtypes = self.dtypes
            record.outputs.append(outputs)
            record.losses.append(value)
            record.of_inputs.append(of_inputs)
            record.of_weights.append(of_weights)
            if mode.run != "replicas":
                for variable, gradient in zip(
                    self.model.trainable_variables, of_weights, strict=True
                ):
                    raw = np.asarray(variable, np.float64)
                    variable.assign(raw - model_inputs.RATE * gradient)
            record.note_state(self.model)
        return record

    def _slope_before(self, outside, place, letters, loss, gradients):
        """Returns `slope` at the state before the step, and restores the state after it."""
        given, calls = place
        after, done = [(v, np.asarray(v)) for v, _ in outside], self.calls
        for variable, value in outside:
            variable.assign(value)
        self.calls = dict(calls)
        found = self.slope(letters, *given, loss, gradients)
        for variable, value in after:
            variable.assign(value)
        self.calls = done
        return found
