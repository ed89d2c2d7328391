"""Two training steps of a model, in each way in which a user would run them.

The model may be wrapped or plain: this module does not use tfwd.
"""

from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfwd
from fuzz import model_inputs
from fuzz.given_weights import IS_KERAS_2, states, tensor_of

STEPS = 2
LOSS_SCALE = 64


@dataclass
class Record:
    """The results of a run.

    Attributes:
        start: the weights before the first step, if they were set.
        dtypes: dtypes of the outputs.
        outputs: the outputs of each step, where the mode shows them.
        of_inputs: for each step the gradients of the loss with respect to the inputs.
        of_weights: for each step the gradients of the loss with respect to the trainable weights.
        losses: the loss of each step.
        weights: the weights after each step, or after the last step only.
        states: the states after each step, or after the last step only.
    """

    start: list = field(default_factory=list)
    dtypes: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    of_inputs: list = field(default_factory=list)
    of_weights: list = field(default_factory=list)
    losses: list = field(default_factory=list)
    weights: list = field(default_factory=list)
    states: list = field(default_factory=list)

    def note_state(self, model):
        self.weights.append(values(model.weights))
        self.states.append(values(states(model)))


def values(variables):
    return [np.asarray(v, np.float64) for v in variables]


def dense(gradient, like):
    """Returns a gradient as a tensor; zeros where there is none."""
    return tf.zeros_like(like) if gradient is None else tf.convert_to_tensor(gradient)


def loss_of(model, outputs, targets):
    """Returns the sum of mean squares, and the losses that layers added."""
    terms = [
        tf.reduce_mean(tf.square(tf.cast(o, t.dtype) - t))
        for o, t in zip(model_inputs.flat(outputs), targets, strict=True)
    ]
    return tf.add_n(terms + [tf.cast(loss, terms[0].dtype) for loss in model.losses])


def call(model, letters, inputs, training):
    """Calls a model, with a bare tensor for a Sequential model."""
    one = isinstance(model, keras.Sequential)
    return model(inputs[0] if one else inputs, training=training)


class Branching:
    """A plain model that handles a tensor flag as tfwd does, by `tf.cond`."""

    losses = ()

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, inputs, training):
        if not tf.is_tensor(training):
            return call(self.model, None, inputs, training)
        branches = [
            lambda flag=flag: call(self.model, None, inputs, flag) for flag in (True, False)
        ]
        return tf.cond(training, *branches)


def step(model, letters, inputs, targets, training):
    """Makes a training step without the update: outputs, loss, gradients."""
    floats = [x for x in inputs if x.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(floats)
        outputs = call(model, letters, inputs, training)
        loss = loss_of(model, outputs, targets)
    # After the call, since the call may make the weights.
    variables = [tensor_of(v) for v in model.trainable_variables]
    gradients = tape.gradient(loss, floats + variables)
    gradients = [dense(g, v) for g, v in zip(gradients, floats + variables, strict=True)]
    return model_inputs.flat(outputs), loss, gradients[: len(floats)], gradients[len(floats) :]


def run(model, letters, shapes, mode, start=None):
    """Makes the steps.

    Args:
        model: the model.
        letters: the types of its inputs.
        shapes: the shapes of its outputs.
        mode: a `Mode`.
        start: the first weights. None: the weights that the first call makes.
    """
    record = Record()
    if start is not None:
        model_inputs.set_weights(model, start)
        record.start = values(model.weights)
    if mode.run.startswith("fit"):
        _fit(model, letters, shapes, mode, record)
    elif mode.run == "loop":
        _loop(model, letters, shapes, mode, record)
    else:
        _steps(model, letters, shapes, mode, record)
    return record


def _steps(model, letters, shapes, mode, record):
    def one(inputs, targets, training):
        return step(model, letters, inputs, targets, training)

    if mode.run != "eager":
        one = tf.function(one, jit_compile=mode.run == "xla", autograph=False)
    flag = tf.constant(True) if mode.tensor_flag else True
    if is_untaped(mode, record.start):
        inputs = model_inputs.inputs(letters, 0)
        first = tf.function(lambda flag: model_inputs.flat(call(model, letters, inputs, flag)))
        first(flag) if mode.run == "function" else call(model, letters, inputs, flag)
    for number in range(STEPS):
        given = model_inputs.inputs(letters, number), model_inputs.targets(shapes, number)
        outputs, loss, of_inputs, of_weights = one(*given, flag)
        if not record.start:
            # A layer's own counter is not in its first state; such models start built.
            record.start = values(model.weights)
        record.dtypes = [t.dtype.name for t in outputs]
        record.outputs.append(values(outputs))
        record.losses.append(float(loss))
        record.of_inputs.append(values(of_inputs))
        record.of_weights.append(values(of_weights))
        _update(model, of_weights)
        record.note_state(model)


def is_untaped(mode, start):
    """Checks whether a training call without a gradient comes first."""
    return mode.untaped and mode.run in ("eager", "function") and bool(start)


def _update(model, gradients):
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        variable = tensor_of(variable)
        variable.assign_sub(tf.cast(model_inputs.RATE, gradient.dtype) * gradient)


def _loop(model, letters, shapes, mode, record):
    given = [model_inputs.inputs(letters, n) for n in range(STEPS)]
    wanted = [model_inputs.targets(shapes, n) for n in range(STEPS)]
    given = [tf.stack(tensors) for tensors in zip(*given, strict=True)]
    wanted = [tf.stack(tensors) for tensors in zip(*wanted, strict=True)]

    @tf.function(autograph=False)
    def steps(training):
        def body(number, losses, outputs):
            inputs = [t[number] for t in given]
            targets = [t[number] for t in wanted]
            found, loss, _, of_weights = step(model, letters, inputs, targets, flag(training))
            _update(model, of_weights)
            losses = losses.write(number, loss)
            # A loop demands that its variables keep their static shapes.
            return number + 1, losses, [tf.cast(t, model_inputs.floatx()) for t in found]

        losses = tf.TensorArray(model_inputs.floatx(), STEPS)
        first = [tf.zeros(shape, model_inputs.floatx()) for shape in shapes]
        _, losses, outputs = tf.while_loop(
            lambda number, *_: number < STEPS, body, [0, losses, first], maximum_iterations=STEPS
        )
        return losses.stack(), outputs

    def flag(training):
        return training if mode.tensor_flag else True

    losses, outputs = steps(tf.constant(True))
    record.losses = [float(loss) for loss in losses]
    # The results of earlier steps are not visible outside.
    record.outputs = [None] * (STEPS - 1) + [values(outputs)]
    record.note_state(model)
    record.weights[:0] = [None] * (STEPS - 1)
    record.states[:0] = [None] * (STEPS - 1)


def _optimizer(mode):
    """Returns SGD. Keras's loss scale for float16 skips the steps whose scaled gradients overflow.

    The oracle skips no step, so the scale is small enough for all gradients of these models.
    """
    sgd = keras.optimizers.SGD(model_inputs.RATE)
    if mode.policy != "mixed_float16":
        return sgd
    scaled = (keras.mixed_precision if IS_KERAS_2 else keras.optimizers).LossScaleOptimizer
    return scaled(sgd, initial_scale=LOSS_SCALE)


def _fit(model, letters, shapes, mode, record):
    model.compile(
        optimizer=_optimizer(mode),
        loss="mse",
        jit_compile=mode.run.endswith("xla"),
    )
    given = [model_inputs.inputs(letters, n) for n in range(STEPS)]
    wanted = [model_inputs.targets(shapes, n) for n in range(STEPS)]
    check = tfwd.callbacks.FiniteCheck()
    callbacks = [check] if "checked" in mode.run else []
    for inputs, targets in zip(given, wanted, strict=True):
        x = inputs[0] if isinstance(model, keras.Sequential) else inputs
        y = targets[0] if isinstance(model, keras.Sequential) else targets
        history = model.fit(
            x, y, batch_size=model_inputs.BATCH, verbose=0, shuffle=False, callbacks=callbacks
        )
        record.losses.append(float(history.history["loss"][-1]))
        record.note_state(model)


def in_replicas(model, letters, shapes, mode, strategy, start) -> list[Record]:
    """Makes the steps on two replicas, each with its own batch, without updates.

    There is a record for each replica.
    """
    model_inputs.set_weights(model, start)
    records = [Record(values(model.weights)), Record(values(model.weights))]

    @tf.function(autograph=False)
    def one(number):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        pick = tf.convert_to_tensor(replica)
        given = [model_inputs.inputs(letters, 10 * n + number) for n in range(2)]
        inputs = [tf.stack(t)[pick] for t in zip(*given, strict=True)]
        wanted = [model_inputs.targets(shapes, 10 * n + number) for n in range(2)]
        targets = [tf.stack(t)[pick] for t in zip(*wanted, strict=True)]
        return step(model, letters, inputs, targets, True)

    for number in range(STEPS):
        results: Any = strategy.run(one, (number,))
        results = tf.nest.map_structure(strategy.experimental_local_results, results)
        outputs, loss, of_inputs, of_weights = results
        for replica, record in enumerate(records):
            record.outputs.append(values(t[replica] for t in outputs))
            record.losses.append(float(loss[replica]))
            record.of_inputs.append(values(t[replica] for t in of_inputs))
            record.of_weights.append(values(t[replica] for t in of_weights))
    return records


def keras_loss(model, inputs, targets, outputs):
    """Returns the loss of `fit`, computed by Keras."""
    if isinstance(model, keras.Sequential):
        inputs, targets = inputs[0], targets[0]
    if IS_KERAS_2:
        return model.compiled_loss(targets, outputs, regularization_losses=model.losses)
    return model.compute_loss(inputs, targets, outputs, training=True)
