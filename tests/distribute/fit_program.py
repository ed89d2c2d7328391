"""A training program that the tests of `fit` start once per worker. It writes what it saw as JSON.

It is also run without workers, to compare. The oracle of the plain models is that run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfwd
from tfwd import layers
from tfwd import parametrizations as P

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(48, 5)).astype("float32")
Y = GENERATOR.integers(0, 3, 48)


def make(strategy: tf.distribute.Strategy, parts: list[Any], **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    with tfwd.distribute.scope(strategy):
        model = keras.Sequential(parts)
        options = {
            "optimizer": keras.optimizers.Adam(0.01),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy"],
            **options,
        }
        model.compile(**options)
    return model


def dense() -> list[Any]:
    first, second = (keras.initializers.GlorotUniform(seed) for seed in (1, 2))
    return [
        keras.layers.Dense(8, activation="relu", kernel_initializer=first),
        keras.layers.Dense(3, kernel_initializer=second),
    ]


def weights(model: keras.Model) -> list[list[float]]:
    return [weight.ravel().tolist() for weight in model.get_weights()]


def fit(model: keras.Model, callbacks: Any = (), epochs: int = 2, **options: Any) -> dict[str, Any]:
    history = model.fit(
        X,
        Y,
        batch_size=16,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        validation_data=(X[:20], Y[:20]),
        validation_batch_size=10,
        callbacks=list(callbacks),
        **options,
    )
    return history.history


def plain(strategy: Any, folder: Path) -> dict[str, Any]:
    model = make(strategy, dense())  # no input shape: `fit` has to build it
    history = fit(model)
    return {
        "history": history,
        "weights": weights(model),
        "evaluate": model.evaluate(X[:30], Y[:30], batch_size=8, verbose=0),
        "predict": model.predict(X[:13], batch_size=8, verbose=0).tolist(),
    }


def several_steps(strategy: Any, folder: Path) -> dict[str, Any]:
    model = make(strategy, [keras.Input((5,)), *dense()], steps_per_execution=3)
    return {"history": fit(model), "weights": weights(model)}


def callbacks(strategy: Any, folder: Path) -> dict[str, Any]:
    def again() -> tuple[keras.Model, dict[str, Any]]:
        model = make(strategy, [keras.Input((5,)), *dense()])
        backup = keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
        found = fit(
            model,
            [
                keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True),
                keras.callbacks.ModelCheckpoint(
                    folder / "epoch-{epoch}.weights.h5", save_weights_only=True
                ),
                backup,
                keras.callbacks.TensorBoard(folder / "logs"),
                keras.callbacks.CSVLogger(folder / "log.csv"),
            ],
            epochs=again.epochs,
        )
        return model, found

    again.epochs = 2  # type: ignore[attr-defined]
    first, _ = again()
    again.epochs = 4  # type: ignore[attr-defined]
    model, history = again()  # resumes from the backup
    straight = make(strategy, [keras.Input((5,)), *dense()])
    fit(straight, epochs=4)
    return {
        "weights": weights(model),
        "straight": weights(straight),
        "resumed_epochs": len(history["loss"]),
        "first": weights(first),
    }


def in_place(strategy: Any, folder: Path) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    with tfwd.distribute.scope(strategy):
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(8, activation="relu", name="hidden")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(3, name="out")(hidden))
        tfwd.parametrize(
            model,
            {"hidden/kernel": P.Dropout(0.5)},
            seed=3,
            share_across_replicas=True,
            in_place=True,
        )
        model.compile(
            keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    history = fit(model)
    return {"history": history, "weights": weights(model)}


def wrapped(strategy: Any, folder: Path) -> dict[str, Any]:
    parts = [
        keras.Input((5,)),
        layers.WeightDropout(keras.layers.Dense(8), 0.5, seed=1, share_across_replicas=True),
        layers.VariationalNoise(keras.layers.Dense(3), 0.1, seed=2, share_across_replicas=True),
    ]
    with tfwd.distribute.scope(strategy):
        optimizer = tfwd.optimizers.DecoupledWeightDecay(keras.optimizers.Adam(0.01), 0.01)
    model = make(strategy, parts, optimizer=optimizer)
    return {
        "history": fit(model),
        "weights": weights(model),
        "calls": [layer.calls for layer in model.layers],
    }


def own_masks(strategy: Any, folder: Path) -> dict[str, Any]:
    parts = [keras.Input((5,)), layers.WeightDropout(keras.layers.Dense(3), 0.5, seed=1)]
    model = make(strategy, parts)
    return {"history": fit(model), "weights": weights(model)}


def moments(strategy: Any, folder: Path) -> dict[str, Any]:
    model = make(strategy, [keras.Input((5,)), *dense()])
    callback = tfwd.callbacks.GradientSquaredMean(
        log_dir=folder / "moments", plot=folder / "moments.png"
    )
    history = fit(model, [callback])
    records = [{k: v for k, v in one.items() if k != "variables"} for one in callback.records]
    return {"history": history, "weights": weights(model), "records": records}


def averaging(strategy: Any, folder: Path) -> dict[str, Any]:
    with tfwd.distribute.scope(strategy):
        optimizer = tfwd.optimizers.NonMonotonicASGD(keras.optimizers.SGD(4.0), 1)
    model = make(strategy, [keras.Input((5,)), *dense()], optimizer=optimizer)
    history = fit(model, [tfwd.optimizers.NonMonotonicASGDCallback()], epochs=6)
    return {
        "history": history,
        "weights": weights(model),
        "triggered": bool(optimizer.triggered),
    }


def not_finite(strategy: Any, folder: Path) -> dict[str, Any]:
    model = make(strategy, [keras.Input((5,)), *dense()])
    bad = X.copy()
    bad[30] = np.nan  # in the second half of batch 2: worker 1 reads it
    check = tfwd.callbacks.FiniteCheck("skip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(bad, Y, batch_size=16, shuffle=False, verbose=0, callbacks=[check])
    found = {
        "skipped": check.skipped,
        "sentences": [report.sentence for report in check.reports],
        "weights": weights(model),
    }
    other = make(strategy, [keras.Input((5,)), *dense()])
    rows = np.r_[0:16, 32:48]  # what "skip" trains on
    other.fit(X[rows], Y[rows], batch_size=16, shuffle=False, verbose=0)
    return {**found, "without_the_batch": weights(other)}


class EndsItself(keras.callbacks.Callback):
    """Sends this process SIGKILL in the second step of the third epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.epoch == 2 and batch == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(strategy: Any, folder: Path) -> dict[str, Any]:
    model = make(strategy, [keras.Input((5,)), *dense()])
    parts = [keras.callbacks.BackupAndRestore(folder / "backup", double_checkpoint=True)]
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    if os.environ.get("KILLED") == str(index):
        parts.append(EndsItself())
    history = fit(model, parts, epochs=4)
    return {"weights": weights(model), "epochs": len(history["loss"])}


def images(strategy: Any, folder: Path) -> dict[str, Any]:
    """Does what TensorFlow's guide to several workers does, with small random images.

    A convolutional model, a dataset that repeats, steps per epoch, a saved model, a checkpoint of
    TensorFlow's own, and the callback for a backup.
    """
    generator = np.random.default_rng(1)
    labels = generator.integers(0, 10, 64)
    pixels = generator.normal(size=(64, 28, 28)).astype("float32") * 0.1
    pixels[np.arange(64), labels, :] += 1
    count = strategy.num_replicas_in_sync
    data = tf.data.Dataset.from_tensor_slices((pixels, labels)).repeat().batch(4 * count)
    keras.utils.set_random_seed(1)
    with tfwd.distribute.scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((28, 28)),
                keras.layers.Reshape((28, 28, 1)),
                keras.layers.Conv2D(4, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.SGD(0.05),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    history = model.fit(data, epochs=4, steps_per_epoch=12, verbose=0, callbacks=[backup])
    # All workers save, and the chief's files remain.
    place = folder if tfwd.distribute.is_chief(strategy) else Path(tempfile.mkdtemp())
    model.save(place / "model.keras")
    loaded = keras.models.load_model(place / "model.keras")
    checkpoint = tf.train.Checkpoint(model=model)
    manager = tf.train.CheckpointManager(checkpoint, str(place / "checkpoints"), max_to_keep=1)
    path = manager.save()
    kept = weights(model)
    for weight in model.weights:
        weight.assign(tf.zeros_like(weight))
    checkpoint.restore(path).assert_existing_objects_matched()
    return {
        "loss": history.history["loss"],
        "accuracy": history.history["accuracy"],
        "weights": kept,
        "loaded": weights(loaded),
        "restored": weights(model),
    }


SCENARIOS = (
    plain,
    several_steps,
    callbacks,
    in_place,
    wrapped,
    own_masks,
    moments,
    averaging,
    not_finite,
    images,
)


def main() -> None:
    folder, out = Path(sys.argv[1]), sys.argv[2]
    alone = "TF_CONFIG" not in os.environ
    strategy: Any = tf.distribute.get_strategy()
    if not alone:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    chosen = sys.argv[3:] or [scenario.__name__ for scenario in SCENARIOS]
    found = {}
    for scenario in (*SCENARIOS, killed):
        if scenario.__name__ in chosen:
            (folder / scenario.__name__).mkdir(parents=True, exist_ok=True)
            found[scenario.__name__] = scenario(strategy, folder / scenario.__name__)
    Path(out).write_text(json.dumps(found, default=float), encoding="utf-8")


if __name__ == "__main__":
    main()
