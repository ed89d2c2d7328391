"""Runs of the fine-tuning experiment in one process.

The pretrained weights are read once. Each method of each task has one traced training step. Before
a run, every variable that the traced step reads or writes is reset: weights, optimizer, schedule,
seeds, counters of draws, and the references of Mixout and of the decay.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import fine_tuning_data as data
import keras
import numpy as np
import tensorflow as tf
from fine_tuning_plan import BATCH, CLIP, EPOCHS, WARMUP, Run

import tfwd
from tfwd import _keras, optimizers
from tfwd import parametrizations as P
from tfwd._keras import training as _keras_training
from tfwd.finetune import learning_rate_schedule, pretrained_folder, scores
from tfwd.finetune.data import batches
from tfwd.finetune.evaluation import Predictor, evaluate
from tfwd.finetune.model import classifier_of, make_model
from tfwd.finetune.training_step import TrainStep
from tfwd.layers._substitution.seed_stream import SeedStream
from tfwd.runs.training.layer_seeds import layer_seeds
from tfwd.runs.training.step_variables import StepVariables

KERNELS = "stack/.*/kernel"  # the weights to which each method is applied


class Training:
    """A callable that makes a run: `training(run)` returns the fields of the run's line.

    Args:
        folder: Path. Folder that contains a folder of texts for each task.
        pretrained: Path. Folder of the encoder.

    Attributes:
        fingerprints: dict from a task to a short hash of its texts.
    """

    def __init__(self, folder: Path, pretrained: Path):
        self._folder, self._pretrained = folder, pretrained
        self._texts = data.read_texts(folder, pretrained)
        self.fingerprints = {task: texts.fingerprint() for task, texts in self._texts.items()}
        self._weights: list[np.ndarray] = []
        self._classifiers: dict[tuple, _Classifier] = {}
        self._methods: dict[tuple, _Method] = {}

    def __call__(self, run: Run) -> dict[str, Any]:
        began = time.perf_counter()
        method = self._method(run)
        traced = time.perf_counter()
        corpus = self._texts[run.task]
        train = corpus.encoded["train"]
        method.reset(run)
        loss = 0.0
        for epoch in range(EPOCHS):
            for chosen in data.epoch_batches(train, run.seed, epoch):
                ids = [train.ids[number] for number in chosen]
                padded = batches.pad(ids, corpus.vocabulary.padding_id, data.LENGTH)
                method.step(tf.constant(padded), tf.constant(train.labels[chosen]))
            if method.step.failure() is not None:
                break
            loss = method.step.state.take_epoch_loss()
        diverged = method.step.failure() is not None
        result: dict[str, Any] = {"diverged": diverged, "train_loss": None if diverged else loss}
        for part in ("valid", "test") if run.kind == "final" else ("valid",):
            encoded = corpus.encoded[part]
            found = None if diverged else evaluate(method.classifier.predict, encoded)
            result[f"{part}_accuracy"] = found.accuracy if found else None
            result[f"{part}_loss"] = found.nats if found and np.isfinite(found.nats) else None
            result[f"{part}_majority"] = scores.majority(encoded.labels)
        return {
            **result,
            "seconds": round(time.perf_counter() - traced, 2),
            "trace_seconds": round(traced - began, 2),
            "data": self.fingerprints[run.task],
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        }

    def _method(self, run: Run) -> _Method:
        """Returns the method with its traced step.

        The strength is a variable, except for "dropout".
        """
        dropout = run.strength if run.method == "dropout" else 0.0
        key = run.task, run.method, dropout
        if key not in self._methods:
            self._methods[key] = _Method(self._classifier(run.task, dropout), run.method)
        return self._methods[key]

    def _classifier(self, task: str, dropout: float) -> _Classifier:
        """Returns an untrained classifier and its Adam. All methods of a task share both."""
        key = task, dropout
        if key not in self._classifiers:
            config = data.configuration(self._folder / task, self._pretrained)
            for name in ("dropout", "attention_dropout", "head_dropout"):
                config.model[name] = dropout
            corpus = self._texts[task]
            made = make_model(config, corpus.vocabulary)
            if not self._weights:
                pretrained_folder.load_weights(made.encoder, config.model.pretrained)
                self._weights = [np.asarray(weight) for weight in made.encoder.weights]
            padding = corpus.vocabulary.padding_id
            predict = Predictor(made, padding, config.data.eval_batch_size, data.LENGTH)
            steps = EPOCHS * len(batches.sizes(len(corpus.encoded["train"].ids), BATCH))
            optimizer = keras.optimizers.Adam()
            _keras_training.build_optimizer(optimizer, made.trainable_variables)
            self._classifiers[key] = _Classifier(made, optimizer, predict, steps)
        found = self._classifiers[key]
        for variable in found.optimizer.variables:
            variable.assign(tf.zeros_like(variable))
        for weight, value in zip(found.model.encoder.weights, self._weights, strict=True):
            weight.assign(value)
        return found


class _Classifier(NamedTuple):
    model: Any
    optimizer: Any
    predict: Predictor
    steps: int


class _Method:
    """A traced training step and the initial values of its variables.

    Args:
        classifier: Classifier with the pretrained weights.
        method: A name in `fine_tuning_plan.METHODS`.
    """

    def __init__(self, classifier: _Classifier, method: str):
        self.classifier = classifier
        self._strength = tf.Variable(0.5, trainable=False)
        model, optimizer = classifier.model, classifier.optimizer
        parametrization: P.Parametrization | None = None
        if method == "weight dropout":
            parametrization = P.Dropout(self._strength)
        elif method.startswith("Mixout"):
            parametrization = P.Mixout(self._strength)
        elif method == "noise by deviation":
            parametrization = P.GaussianNoise(self._strength, scale="deviation")
        elif method == "decay towards the start":
            optimizer = optimizers.DecoupledWeightDecay(
                keras.optimizers.Adam(),
                self._strength,
                "learning_rate",
                include=KERNELS,
                towards="start",
            )
        if parametrization is not None:
            model = tfwd.parametrize(model, {KERNELS: parametrization}, seed=0)
        steps = classifier.steps
        self.step = TrainStep(
            model,
            optimizer,
            StepVariables([], 0.0),
            steps=steps,
            warmup=learning_rate_schedule.warmup_steps(steps, WARMUP),
            clip_norm=CLIP,
        )
        self.step.trace()
        self._streams = [
            layer for layer in _keras.layers.all_layers(model) if isinstance(layer, SeedStream)
        ]
        self._first = [(v, _first(v)) for v in variables(self.step)]

    def reset(self, run: Run) -> None:
        """Resets all variables to their values at the start of a run in a new process."""
        for variable, value in self._first:
            variable.assign(tf.zeros_like(variable) if value is None else value)
        self._strength.assign(run.strength)
        self.step.state.learning_rate.assign(run.rate)
        row = layer_seeds(run.seed)
        for stream in self._streams:
            stream.state.assign([next(row), 0])
        head = classifier_of(self.step.model).head
        head.kernel.assign(data.first_head(run.seed, *head.kernel.shape))
        head.bias.assign(tf.zeros_like(head.bias))


def variables(step: TrainStep) -> list[tf.Variable]:
    """Returns every variable that a traced step reads or writes.

    Raises:
        RuntimeError: If the step uses a variable that TensorFlow does not list.
    """
    graph = step.function.get_concrete_function().graph
    found = list(graph.variables)
    used = {id(handle) for handle, _ in graph.captures if handle.dtype == tf.resource}
    missing = used - {id(variable.handle) for variable in found}
    if missing:
        raise RuntimeError(
            f"{len(missing)} variables of the training step are not among the graph's variables, "
            "so they cannot be reset: keep a reference to each variable of the step"
        )
    return found


def _first(variable: tf.Variable) -> np.ndarray | None:
    """Returns the value, or None if all its entries are zero."""
    value = variable.numpy()
    return value if value.any() else None
