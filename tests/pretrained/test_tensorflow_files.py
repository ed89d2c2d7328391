"""Weights of a Keras model from TensorFlow's own files, and keys that are no weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfwd.pretrained import PlanError, load

KERNEL = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")


def model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="d")])


def module():
    """Returns an object of TensorFlow whose variable has the path `d/kernel`."""
    outer = tf.Module()
    outer.d = tf.Module()
    outer.d.kernel = tf.Variable(KERNEL)
    return outer


def save_checkpoint(folder):
    """Saves a checkpoint, which has a counter of saves."""
    outer = module()
    tf.train.Checkpoint(d=outer.d).save(str(folder / "model"))


def save_saved_model(folder):
    tf.saved_model.save(module(), str(folder))


@pytest.mark.parametrize("save", [save_checkpoint, save_saved_model])
def test_a_folder_of_tensorflow(save, tmp_path):
    save(tmp_path)
    loaded = model()
    load(loaded, tmp_path, allow_missing="d/bias")
    np.testing.assert_array_equal(loaded.layers[-1].kernel, KERNEL)


def test_the_error_about_slots_asks_for_no_mapping(tmp_path):
    """Checks a file in which each variable has its path as the key, beside Adam's slots."""
    weights = {"d/kernel": KERNEL, "d/bias": np.zeros(3, "float32")}
    np.savez(tmp_path / "a.npz", **weights, **{"d/kernel/m": KERNEL})
    with pytest.raises(PlanError, match="'d/kernel/m' belongs to no variable") as error:
        load(model(), tmp_path)
    assert "no mapping was given" not in str(error.value)
    np.savez(tmp_path / "a.npz", **{"d/kernel": KERNEL, "e/bias": np.zeros(3)})
    with pytest.raises(PlanError, match="no mapping was given"):
        load(model(), tmp_path)
