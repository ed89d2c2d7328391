"""Legacy optimizers and optimizers of tensorflow-addons: first decay, then their own step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from optimizer_tools import assert_same, values, variables

from tfwd.optimizers import DecoupledWeightDecay
from tfwd.optimizers.addons import extend_with_decoupled_weight_decay

tfa = pytest.importorskip("tensorflow_addons", reason="tensorflow-addons is on the other stack")
from addons_optimizers_table import (  # noqa: E402
    EVERY,
    INNER,
    RATE,
    D,
    legacy,
    sparse_gradient,
    steps,
    table,
)


def decay_by_hand(weights):
    for variable in weights:
        variable.assign_sub(D * variable)


@pytest.mark.parametrize("name", EVERY)
def test_decays_first_and_then_makes_the_step_of_the_wrapped_one(name):
    """Checks steps bit for bit; slots are made before the first decay."""
    optimizer, bare = DecoupledWeightDecay(EVERY[name](), D), EVERY[name]()
    assert isinstance(optimizer, legacy.Optimizer) and isinstance(optimizer, DecoupledWeightDecay)
    ours, theirs = variables("float32"), variables("float32")
    bare._create_all_weights(theirs)
    for number in range(4):
        steps(optimizer, ours, number, 1)
        decay_by_hand(theirs)
        steps(bare, theirs, number, 1)
        assert_same(values(ours), values(theirs))
    assert int(optimizer.iterations) == 4


@pytest.mark.parametrize("name", EVERY)
def test_without_decay_it_is_the_wrapped_one_bit_for_bit(name):
    optimizer, bare = DecoupledWeightDecay(EVERY[name](), 0), EVERY[name]()
    ours, theirs = variables("float32"), variables("float32")
    steps(optimizer, ours)
    steps(bare, theirs)
    assert_same(values(ours), values(theirs))
    assert_same(values(optimizer.variables()), values(bare.weights))


@pytest.mark.parametrize("name", EVERY)
def test_in_a_tf_function_from_config_and_from_a_checkpoint(name, tmp_path):
    """Checks four steps at once against two, a checkpoint, a new optimizer, and two more."""
    whole, weights = DecoupledWeightDecay(EVERY[name](), D, exclude="bias"), variables("float32")
    whole.build(weights)
    steps(whole, weights, 0, 4, compiled=True)
    part, others = DecoupledWeightDecay(EVERY[name](), D, exclude="bias"), variables("float32")
    part.build(others)
    steps(part, others, 0, 2, compiled=True)
    path = tf.train.Checkpoint(optimizer=part, weights=others).write(str(tmp_path / "state"))
    fresh = variables("float32")
    for variable in fresh:
        variable.assign(variable * 0)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(part))
    assert again.__class__ is DecoupledWeightDecay
    assert again.optimizer.__class__ is part.optimizer.__class__
    again.build(fresh)
    state = tf.train.Checkpoint(optimizer=again, weights=fresh)
    state.read(path).assert_existing_objects_matched()
    steps(again, fresh, 2, 2, compiled=True)
    assert_same(values(fresh), values(weights))


# Sparse gradients.

SPARSE = [name for name in INNER if name not in ("COCOB", "LAMB", "ConditionalGradient")]


@pytest.mark.parametrize("sparse", ["table", "rows"])
@pytest.mark.parametrize("name", [*SPARSE, "LAMB", "ConditionalGradient"])
def test_a_sparse_gradient(name, sparse):
    optimizer, bare = DecoupledWeightDecay(INNER[name](), D, sparse=sparse), INNER[name]()
    ours, theirs = table(), table()
    bare._create_all_weights([theirs])
    for number in range(3):
        gradient = sparse_gradient(number)
        optimizer.apply_gradients([(gradient, ours)])
        if sparse == "table":
            theirs.assign_sub(D * theirs)
        else:
            rows = np.unique(gradient.indices)
            decayed = theirs.numpy()
            decayed[rows] -= np.float32(D) * decayed[rows]
            theirs.assign(decayed)
        bare.apply_gradients([(gradient, theirs)])
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def test_cocob_has_no_sparse_gradients():
    weight = table()
    with pytest.raises(NotImplementedError):
        DecoupledWeightDecay(INNER["COCOB"](), D).apply_gradients([(sparse_gradient(0), weight)])


# tensorflow-addons' own decay.

HALVES = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [0.5, 0.25, 0.125])
PEERS = {
    "AdamW": (lambda d: tfa.optimizers.AdamW(d, RATE), lambda: legacy.Adam(RATE)),
    "AdamW, amsgrad": (
        lambda d: tfa.optimizers.AdamW(d, RATE, amsgrad=True),
        lambda: legacy.Adam(RATE, amsgrad=True),
    ),
    "SGDW": (
        lambda d: tfa.optimizers.SGDW(d, RATE, momentum=0.9),
        lambda: legacy.SGD(RATE, momentum=0.9),
    ),
    "SGDW, nesterov": (
        lambda d: tfa.optimizers.SGDW(d, RATE, momentum=0.9, nesterov=True),
        lambda: legacy.SGD(RATE, momentum=0.9, nesterov=True),
    ),
}
PLAIN = (lambda d: tfa.optimizers.SGDW(d, RATE), lambda: legacy.SGD(RATE))


@pytest.mark.parametrize("decay", [D, HALVES], ids=["number", "schedule"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", [*PEERS, "SGDW, plain"])
def test_equal_to_tensorflow_addons_bit_for_bit(name, compiled, decay):
    theirs, inner = {**PEERS, "SGDW, plain": PLAIN}[name]
    dense = [variables("float32"), variables("float32")]
    optimizers = theirs(decay), DecoupledWeightDecay(inner(), decay, sparse="rows")
    for optimizer, weights in zip(optimizers, dense, strict=True):
        steps(optimizer, weights, count=5, compiled=compiled)
    assert_same(values(dense[1]), values(dense[0]))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", PEERS)
def test_equal_with_sparse_gradients_bit_for_bit(name, compiled):
    """Checks that both decay rows once that the indices name twice."""
    theirs, inner = PEERS[name]
    found = []
    for optimizer in (theirs(D), DecoupledWeightDecay(inner(), D, sparse="rows")):
        weight = table()

        def step(grads, rows, optimizer=optimizer, weight=weight):
            gradient = tf.IndexedSlices(grads, rows, tf.constant([6, 2]))
            optimizer.apply_gradients([(gradient, weight)])

        step = tf.function(step, autograph=False) if compiled else step
        for number in range(5):
            gradient = sparse_gradient(number)
            assert len(np.unique(gradient.indices)) < 4 or number
            step(gradient.values, gradient.indices)
        found.append(weight.numpy())
    np.testing.assert_array_equal(found[1], found[0])


def test_sgdw_without_momentum_forgets_rows_and_this_does_not():
    """Checks that the SGDW of tensorflow-addons decays no sparse gradient without momentum."""
    gradient = tf.IndexedSlices(tf.zeros([2, 2]), tf.constant([1, 1]), tf.constant([6, 2]))
    ours, theirs = table(), table()
    old = ours.numpy()
    PLAIN[0](D).apply_gradients([(gradient, theirs)])
    np.testing.assert_array_equal(theirs.numpy(), old)
    DecoupledWeightDecay(PLAIN[1](), D, sparse="rows").apply_gradients([(gradient, ours)])
    old[1] -= np.float32(D) * old[1]
    np.testing.assert_array_equal(ours.numpy(), old)


@pytest.mark.parametrize("name", PEERS)
def test_new_optimizers_are_equal_to_rounding(name):
    theirs, inner = PEERS[name]
    config = inner().get_config()
    kind = getattr(keras.optimizers, inner().__class__.__name__)
    arguments = {key: config[key] for key in ("amsgrad", "momentum", "nesterov") if key in config}
    ours = DecoupledWeightDecay(kind(learning_rate=RATE, **arguments), D, sparse="rows")
    dense, found = variables("float32"), variables("float32")
    steps(theirs(D), dense)
    steps(ours, found)
    for a, b in zip(values(found), values(dense), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_extending_a_legacy_class_gives_a_legacy_optimizer():
    kind = extend_with_decoupled_weight_decay(legacy.Adam)
    theirs = tfa.optimizers.AdamW(D, RATE, exclude_from_weight_decay=["bias"])
    ours = kind(D, learning_rate=RATE, exclude_from_weight_decay=["bias"])
    assert isinstance(ours, legacy.Optimizer) and isinstance(ours, kind)
    found = variables("float32"), variables("float32")
    for optimizer, weights in zip((theirs, ours), found, strict=True):
        steps(optimizer, weights)
    assert_same(values(found[1]), values(found[0]))
    again = kind.from_config(ours.get_config())
    assert again.get_config() == ours.get_config()
