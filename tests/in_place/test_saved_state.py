"""State of parametrizations in place: it resumes with the same draws, from each kind of file."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2, quick_rows

import tfwd
from tfwd import parametrizations as P

X = np.random.default_rng(0).normal(size=(12, 5)).astype("float32")
Y = X[:, :1] * 2


def plain(units: int = 4) -> keras.Model:
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((5,)), dense(units, activation="tanh"), dense(1)])
    model.compile("adam", "mse")
    return model


def made(seed: int | None = 3, units: int = 4) -> keras.Model:
    """Returns a compiled model with dropout and Mixout in place."""
    model = plain(units)
    parts = {"(.*/)?kernel": P.Chain([P.Dropout(0.5), P.Mixout(0.5)])}
    return tfwd.parametrize(model, parts, seed=seed, in_place=True)


def train(model: keras.Model, epochs: int = 1, **options) -> None:
    model.fit(X, Y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, **options)


class Stopped(Exception):
    """Ends a training as a crash would."""


class StopIn(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise Stopped


@pytest.fixture(scope="module")
def undisturbed() -> list[np.ndarray]:
    model = made()
    train(model, 4)
    return model.get_weights()


def test_the_files_of_the_model_and_of_its_state(tmp_path: Path, undisturbed: list) -> None:
    first = made()
    train(first, 2)
    first.save(tmp_path / "model.keras")
    tfwd.save_state(first, tmp_path / "state.npz")
    keras.utils.set_random_seed(5)
    second = keras.saving.load_model(tmp_path / "model.keras")
    parts = {"(.*/)?kernel": P.Chain([P.Dropout(0.5), P.Mixout(0.5)])}
    tfwd.parametrize(second, parts, seed=99, in_place=True)
    tfwd.load_state(second, tmp_path / "state.npz")
    assert [one.calls for one in tfwd.added_parametrizations(second)] == [6]
    train(second, 2)
    for one, other in zip(second.get_weights(), undisturbed, strict=True):
        np.testing.assert_array_equal(one, other)


def test_backup_and_restore(tmp_path: Path, undisturbed: list) -> None:
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup" if IS_KERAS_2 else str(tmp_path))
    with pytest.raises(Stopped):
        train(made(), 4, callbacks=[backup, StopIn()])
    keras.utils.set_random_seed(5)
    model = made(seed=99)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup" if IS_KERAS_2 else str(tmp_path))
    train(model, 4, callbacks=[backup])
    assert tfwd.added_parametrizations(model)[0].calls == 12
    for one, other in zip(model.get_weights(), undisturbed, strict=True):
        np.testing.assert_array_equal(one, other)


@quick_rows("False")
@pytest.mark.parametrize("before", [True, False])
def test_checkpoint(tmp_path: Path, undisturbed: list, before: bool) -> None:
    """Restores a checkpoint, also before the model is parametrized."""
    first = made()
    train(first, 2)
    path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(str(tmp_path / "c"))
    second = plain()
    parts = {"(.*/)?kernel": P.Chain([P.Dropout(0.5), P.Mixout(0.5)])}
    if not before:
        tfwd.parametrize(second, parts, seed=99, in_place=True)
    second.optimizer.build(second.trainable_variables)
    status = tf.train.Checkpoint(model=second, optimizer=second.optimizer).restore(path)
    if before:
        tfwd.parametrize(second, parts, seed=99, in_place=True)
    status.assert_existing_objects_matched()
    assert tfwd.added_parametrizations(second)[0].calls == 6
    train(second, 2)
    for one, other in zip(second.get_weights(), undisturbed, strict=True):
        np.testing.assert_array_equal(one, other)


def test_files_load_into_the_plain_model(tmp_path: Path) -> None:
    """The files have nothing of tfwd: a plain model of the same class reads them."""
    model = made()
    train(model)
    suffix = "weights.h5"
    model.save_weights(tmp_path / f"w.{suffix}")
    other = plain()
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / f"w.{suffix}")
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert type(loaded) is keras.Sequential and not tfwd.added_parametrizations(loaded)
    np.testing.assert_array_equal(model.predict(X, verbose=0), loaded.predict(X, verbose=0))
    assert not any("tfwd" in str(layer) for layer in model.get_config()["layers"])
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "c"))
    fresh = plain()
    tf.train.Checkpoint(model=fresh).restore(path).expect_partial()
    np.testing.assert_array_equal(model.get_weights()[0], fresh.get_weights()[0])


def test_a_backup_of_a_plain_model_is_an_error(tmp_path: Path) -> None:
    if IS_KERAS_2:
        pytest.skip("TensorFlow's checkpoints cannot tell")
    callbacks = [keras.callbacks.BackupAndRestore(str(tmp_path)), StopIn()]
    with pytest.raises(Stopped):
        train(plain(), 4, callbacks=callbacks)
    callbacks = [keras.callbacks.BackupAndRestore(str(tmp_path))]
    with pytest.raises(ValueError, match="made without parametrizations in place"):
        train(made(), 4, callbacks=callbacks)


def test_wrong_files(tmp_path: Path) -> None:
    file = tmp_path / "state.npz"
    with pytest.raises(ValueError, match="'sequential.*' has no parametrizations in place"):
        tfwd.save_state(plain(), file)
    with pytest.raises(FileNotFoundError):
        tfwd.load_state(made(), file)
    model = made()
    train(model)
    tfwd.save_state(model, file)
    content = file.read_bytes()
    with pytest.raises(ValueError, match=r"'kernel' of shape \(5, 4\) at position 0 with Dropout"):
        tfwd.load_state(made(units=6), file)
    half = tfwd.parametrize(plain(), {"dense.*/kernel": P.Dropout(0.5)}, in_place=True)
    tfwd.parametrize(half, {"bias": P.GaussianNoise(0.1)}, in_place=True)
    with pytest.raises(ValueError, match="is of 1 calls of tfwd.parametrize, and the model had 2"):
        tfwd.load_state(half, file)
    calls = [one.calls for one in tfwd.added_parametrizations(half)]
    assert calls == [0, 0]
    other = tfwd.parametrize(plain(), {"(.*/)?kernel": P.Mixout(0.5)}, in_place=True)
    with pytest.raises(ValueError, match="with Dropout then Mixout, where the model has.*Mixout"):
        tfwd.load_state(other, file)
    assert tfwd.added_parametrizations(other)[0].calls == 0
    for size in (0, 10, len(content) // 2, len(content) - 30):
        file.write_bytes(content[:size])
        other = made()
        with pytest.raises(ValueError, match="not a complete file of tfwd.save_state"):
            tfwd.load_state(other, file)
        assert tfwd.added_parametrizations(other)[0].calls == 0
