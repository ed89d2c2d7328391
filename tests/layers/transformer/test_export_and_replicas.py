"""Transformer layers in an exported model, and on replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import two_replicas
from stack_marks import IS_KERAS_2, extended

from tfwd.layers import transformer as T

IDS = np.array([[2, 5, 9, 4], [7, 3, 0, 0], [6, 2, 8, 0], [1, 0, 0, 0]])
Y = np.array([[1.0], [0.0], [2.0], [-1.0]], "float32")


def classifier(dropout=0.0, **options):
    keras.utils.set_random_seed(3)
    ids = keras.Input((None,), dtype="int32")
    hidden = T.Bert(11, 6, 2, 2, 8, max_length=7, dropout=dropout, name="bert")(ids)
    return keras.Model(ids, keras.layers.Dense(1, name="out")(hidden[:, 0]), **options)


@extended
def test_an_exported_model_leaves_padding_out_too(tmp_path):
    model = classifier()
    model.export(str(tmp_path / "model"), **({} if IS_KERAS_2 else {"verbose": False}))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    ids = tf.constant(IDS, tf.int32)
    np.testing.assert_allclose(loaded.serve(ids), model(ids), rtol=1e-5, atol=1e-6)
    longer = tf.pad(ids, [[0, 0], [0, 3]])
    np.testing.assert_allclose(loaded.serve(longer), model(ids), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["bert", "t5", "two streams"])
def test_a_checkpoint_has_every_weight(kind, tmp_path):
    def made():
        if kind == "bert":
            layer = T.Bert(11, 6, 2, 2, 8, max_length=7)
            layer(IDS)
        elif kind == "t5":
            layer = T.T5(11, 2, 2, 2, 4, 6, tied=False)
            layer(IDS, IDS)
        else:
            stacks = [T.TransformerStack(2, 2, 6, 8, name=name) for name in ("first", "second")]
            layer = T.BiModalEncoder(*stacks, connections=[(1, 1)])
            layer(tf.ones([1, 3, 6]), tf.ones([1, 3, 6]))
        return layer

    layer, other = made(), made()
    rng = np.random.default_rng(0)
    layer.set_weights([rng.normal(size=w.shape) for w in layer.weights])
    path = tf.train.Checkpoint(layer=layer).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(layer=other).read(path).assert_existing_objects_matched()
    for ours, theirs in zip(other.get_weights(), layer.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_two_replicas_train_as_one_process():
    strategy = two_replicas()
    trained = []
    for scope in (tf.distribute.get_strategy(), strategy):
        with scope.scope():
            model = classifier()
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        model.fit(IDS, Y, batch_size=4, epochs=3, verbose=0)
        trained.append(model.get_weights())
    for one, two in zip(*trained, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


FREEZE = {
    "embeddings": lambda bert: setattr(bert.embeddings, "trainable", False),
    "a layer and a kernel's owner": lambda bert: (
        setattr(bert.stack.layers[0], "trainable", False),
        setattr(bert.stack.layers[1].attention.query, "trainable", False),
    ),
    "all but a layer": lambda bert: (
        setattr(bert.embeddings, "trainable", False),
        [setattr(layer, "trainable", False) for layer in bert.stack.layers[:1]],
    ),
    "all": lambda bert: setattr(bert, "trainable", False),
}


@pytest.mark.parametrize("what", FREEZE)
def test_frozen_parts_stay_frozen_in_files(what, tmp_path):
    model = classifier()
    FREEZE[what](model.get_layer("bert"))
    model.save(tmp_path / "model.keras")
    for again in (
        keras.models.load_model(tmp_path / "model.keras"),
        keras.models.clone_model(model),
    ):
        for kind in ("trainable_weights", "non_trainable_weights"):
            assert len(getattr(again, kind)) == len(getattr(model, kind))


def test_a_model_with_frozen_parts_resumes_from_a_file(tmp_path):
    """Checks that the optimizer's state belongs to the trained weights, and is not dropped."""
    model = classifier()
    FREEZE["embeddings"](model.get_layer("bert"))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", jit_compile=False)
    model.fit(IDS, Y, epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    slots = [value(v) for v in variables_of(model.optimizer)]
    for ours, theirs in zip(variables_of(again.optimizer), slots, strict=True):
        np.testing.assert_array_equal(value(ours), theirs)
    frozen = [value(w) for w in again.non_trainable_weights]
    for one in (model, again):
        one.fit(IDS, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    for ours, theirs in zip(again.weights, model.weights, strict=True):
        np.testing.assert_allclose(value(ours), value(theirs), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(again.non_trainable_weights, frozen, strict=True):
        np.testing.assert_array_equal(value(ours), theirs)


def value(variable):
    return tf.convert_to_tensor(variable).numpy()


def variables_of(optimizer):
    return optimizer.variables() if callable(optimizer.variables) else optimizer.variables


def test_flags_of_layers_inside_are_the_configs():
    """Checks that each flag stays as it was, also inside a frozen layer; unset flags stay unset."""
    stacks = [T.TransformerStack(2, 2, 6, 8, name=name) for name in ("first", "second")]
    both = T.BiModalEncoder(*stacks, connections=[(1, 1)])
    assert "trainable_inside" not in both.get_config()
    both.first.trainable = False
    both.first.layers[1].trainable = True
    both.second.layers[0].attention.trainable = False
    again = T.BiModalEncoder.from_config(both.get_config())
    for ours, theirs in (
        (again.first, False),
        (again.first.layers[0].intermediate, False),
        (again.first.layers[1].attention.query, True),
        (again.second, True),
        (again.second.layers[0].attention.query, False),
        (again.second.layers[0].intermediate, True),
    ):
        assert ours.trainable is theirs
    assert again.get_config() == both.get_config()
