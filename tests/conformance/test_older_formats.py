"""Whole models in the older formats of Keras 2: a SavedModel in a folder, and `.h5`."""

from pathlib import Path

import keras
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2, soak

from conformance import harness
from conformance.table import DROPOUT, Case
from tfwd import layers

pytestmark = [
    pytest.mark.skipif(not IS_KERAS_2, reason="Keras 3 writes neither"),
    pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file"),
]

# Keras's own code finds the weights in its layers of cells in neither format.
CELLS = {"MinimalCell", "LayerNormLSTMCell", "NASCell", "ESNCell"}
# For a model in a model, `.h5` files cannot hold two weights of the same name.
NOT_IN_H5 = {"subclassed model"}


# Each layer in one format, in turn; an eighth of them where there is little time.
_FILES = [
    pytest.param(case, file, id=f"{case.name}, {file}", marks=[soak] * (number % 8 != 5))
    for number, case in enumerate(DROPOUT)
    for file in (("folder", "file.h5")[number % 2],)
]


@pytest.mark.parametrize(("case", "file"), _FILES)
def test_whole_model(case: Case, file: str, tmp_path: Path) -> None:
    if file == "file.h5" and case.row.name in NOT_IN_H5:
        pytest.skip("weights of the same name")
    wrapped = harness.built(case)
    model = harness.model_of(wrapped, case)
    model(harness.feed(case), training=True)
    model.reset_states()
    expected = model(harness.feed(case))
    model.reset_states()
    model.save(tmp_path / file)
    harness.assert_same(model(harness.feed(case)), expected)  # saving has changed nothing
    cells = {type(x).__name__: type(x) for x in model._flatten_layers()}
    with keras.saving.custom_object_scope({k: v for k, v in cells.items() if k in CELLS}):
        loaded = keras.models.load_model(tmp_path / file)
    loaded.reset_states()
    harness.assert_close(loaded(harness.feed(case)), expected, 1e-6)
    (again,) = (x for x in loaded.layers if type(x) is type(wrapped))
    for call in range(2):
        found, wanted = harness.effective(again, call), harness.effective(wrapped, call)
        harness.assert_same(list(found.values()), list(wanted.values()))
    # An `.h5` file has a layer's weights and no other state.
    assert [p.calls for p in harness.perturbing(loaded)] == [0 if file == "file.h5" else 1]


@pytest.mark.slow
def test_saved_training_function_has_gradients(tmp_path: Path) -> None:
    """Checks that a saved training function has gradients when it is loaded without tfwd.

    TensorFlow cannot save tfwd's custom gradients.
    """
    inputs = keras.Input((5, 3))
    dropped = layers.WeightDropLSTM(4, 0.5, seed=1, return_sequences=True)
    model = keras.Model(inputs, layers.WeightDropout(keras.layers.GRU(2), 0.5)(dropped(inputs)))
    model.save(tmp_path / "folder")
    loaded = tf.saved_model.load(str(tmp_path / "folder"))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(loaded(tf.ones([2, 5, 3]), training=True))
    assert None not in tape.gradient(loss, loaded.trainable_variables)
