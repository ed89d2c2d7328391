"""Legacy optimizers of Keras 2, and tensorflow-addons', of which all are legacy."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from optimizers_table import X, Y, assert_same, fit, gradients, model, values, variables

from tfwd.optimizers import (
    DecoupledWeightDecay,
    NonMonotonicASGD,
    NonMonotonicASGDCallback,
    extend_with_decoupled_weight_decay,
)

tfa = pytest.importorskip("tensorflow_addons", reason="tensorflow-addons is on the other stack")
legacy = keras.optimizers.legacy
LossScale = keras.mixed_precision.LossScaleOptimizer
D, RATE = 0.03, 0.1
ADDONS = {
    name: lambda name=name: getattr(tfa.optimizers, name)(learning_rate=RATE)
    for name in ("LAMB", "LazyAdam", "RectifiedAdam", "NovoGrad", "Yogi", "AdaBelief")
}
ADDONS["COCOB"] = lambda: tfa.optimizers.COCOB()
ADDONS["ConditionalGradient"] = lambda: tfa.optimizers.ConditionalGradient(RATE, 10.0)
LEGACY = {
    name: lambda name=name: getattr(legacy, name)(learning_rate=RATE)
    for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "Nadam", "RMSprop", "SGD")
}
LEGACY["momentum"] = lambda: legacy.SGD(RATE, momentum=0.9)
INNER = {**ADDONS, **LEGACY}
AVERAGES = {
    "Lookahead": lambda inner: tfa.optimizers.Lookahead(inner, sync_period=2),
    "SWA": lambda inner: tfa.optimizers.SWA(inner, start_averaging=1, average_period=2),
    "MovingAverage": lambda inner: tfa.optimizers.MovingAverage(inner, average_decay=0.5),
}
EVERY = {
    **INNER,
    **{f"{name} of Adam": lambda f=f: f(legacy.Adam(RATE)) for name, f in AVERAGES.items()},
}


def steps(optimizer, weights, first=0, count=3, compiled=False):
    def step(*grads):
        optimizer.apply_gradients(zip(grads, weights, strict=True))

    step = tf.function(step, autograph=False) if compiled else step
    for number in range(first, first + count):
        step(*gradients(number, "float32"))


def decay_by_hand(weights):
    for variable in weights:
        variable.assign_sub(D * variable)


@pytest.mark.parametrize("name", EVERY)
def test_decays_first_and_then_makes_the_step_of_the_wrapped_one(name):
    """Bit for bit; slots are made before the first decay."""
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
    """Four steps at once, against two, a checkpoint, a new optimizer from the config, two more."""
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


def sparse_gradient(step):
    rng = np.random.default_rng(step)
    rows = tf.constant(rng.choice(6, 4))
    return tf.IndexedSlices(
        tf.constant(rng.normal(size=(4, 2)), tf.float32), rows, tf.constant([6, 2])
    )


def table():
    return tf.Variable(np.random.default_rng(5).normal(size=(6, 2)), dtype=tf.float32, name="table")


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
    """Rows that the indices name twice are decayed once by both."""
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
    """tensorflow-addons' SGDW decays nothing of a sparse gradient if it has no momentum."""
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


# Lookahead, SWA and MovingAverage.


@pytest.mark.parametrize("name", AVERAGES)
def test_inside_an_average(name):
    """As the average of an optimizer of tensorflow-addons that decays by itself."""
    average = AVERAGES[name]
    ours = average(DecoupledWeightDecay(legacy.Adam(RATE), D, sparse="rows"))
    theirs = average(tfa.optimizers.AdamW(D, RATE))
    found = []
    for optimizer in (theirs, ours):
        weights, embedding = variables("float32"), table()
        for number in range(5):
            pairs = [*zip(gradients(number, "float32"), weights, strict=True)]
            optimizer.apply_gradients([*pairs, (sparse_gradient(number), embedding)])
        found.append(values([*weights, embedding]))
        if name != "Lookahead":
            optimizer.assign_average_vars([*weights, embedding])
            found[-1] += values([*weights, embedding])
    assert_same(found[1], found[0])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", AVERAGES)
def test_exclusions_hold_in_and_around_an_average(name, inside, compiled):
    average = AVERAGES[name]
    if inside:
        optimizer = average(DecoupledWeightDecay(legacy.SGD(0.0), 0.5, exclude="bias"))
    else:
        optimizer = DecoupledWeightDecay(average(legacy.SGD(0.0)), 0.5, exclude="bias")
    weights = variables("float32")
    old = values(weights)
    again = optimizer.__class__.from_config(optimizer.get_config())
    steps(again, weights, 0, 1, compiled)
    np.testing.assert_array_equal(weights[1].numpy(), old[1])
    np.testing.assert_array_equal(weights[0].numpy(), old[0] * 0.5)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", AVERAGES)
def test_fit_and_a_checkpoint_with_an_average(name, inside, tmp_path):
    def compiled():
        net, average = model(), AVERAGES[name]
        decay = {"weight_decay": D, "exclude": "bias"}
        if inside:
            optimizer = average(DecoupledWeightDecay(legacy.Adam(RATE), **decay))
        else:
            optimizer = DecoupledWeightDecay(average(legacy.Adam(RATE)), **decay)
        net.compile(optimizer, "mse")
        return net

    whole, half = compiled(), compiled()
    fit(whole, epochs=2)
    fit(half)
    path = tf.train.Checkpoint(model=half, optimizer=half.optimizer).write(str(tmp_path / "state"))
    again = compiled()
    again.optimizer._create_all_weights(again.trainable_variables)
    state = tf.train.Checkpoint(model=again, optimizer=again.optimizer)
    state.read(path).assert_existing_objects_matched()
    fit(again)
    assert_same(again.get_weights(), whole.get_weights())


def test_the_learning_rate_of_an_average_is_that_of_the_one_in_it():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    for optimizer in (
        DecoupledWeightDecay(tfa.optimizers.Lookahead(legacy.SGD(schedule)), 0.5, "learning_rate"),
        tfa.optimizers.Lookahead(DecoupledWeightDecay(legacy.SGD(schedule), 0.5, "learning_rate")),
    ):
        weight = tf.Variable([1.0], name="weight")
        for _ in range(2):
            optimizer.apply_gradients([(tf.zeros([1]), weight)])
        assert float(weight[0]) == 0.75 * 0.875
    optimizer = DecoupledWeightDecay(tfa.optimizers.Lookahead(legacy.SGD(0.5)), 0.5, "schedule")
    optimizer.learning_rate = 0.25
    optimizer.lr.assign(0.25)
    assert optimizer.decay_table([weight])[0].decay == 0.25


# Loss scales, replicas, averages of one's own.

NESTINGS = {
    "around": lambda: LossScale(DecoupledWeightDecay(legacy.Adam(RATE), D, exclude="bias")),
    "inside": lambda: DecoupledWeightDecay(LossScale(legacy.Adam(RATE)), D, exclude="bias"),
    "none": lambda: DecoupledWeightDecay(legacy.Adam(RATE), D, exclude="bias"),
}


def test_the_order_of_nesting_with_loss_scaling_does_not_matter():
    keras.mixed_precision.set_global_policy("mixed_float16")
    found = []
    for nest in NESTINGS.values():  # Keras puts a loss scale around the second and the third
        net = model()
        net.compile(nest(), "mse")
        fit(net, epochs=2)
        found.append(net.get_weights())
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@pytest.mark.parametrize("nest", ["around", "inside"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_skipped_step_changes_nothing(nest, compiled):
    optimizer, weights = NESTINGS[nest](), variables("float32")
    steps(optimizer, weights, compiled=compiled)
    before, slots = values(weights), [v.numpy() for v in optimizer.variables()]
    infinite = [g * np.inf for g in gradients(0, "float32")]

    def step():
        optimizer.apply_gradients(zip(infinite, weights, strict=True))

    (tf.function(step, autograph=False) if compiled else step)()
    assert_same(values(weights), before)
    for variable, old in zip(optimizer.variables(), slots, strict=True):
        assert "iter" in variable.name or np.array_equal(variable.numpy(), old)


@pytest.mark.parametrize("nest", NESTINGS)
def test_fit_on_two_replicas(nest):
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    with strategy.scope():
        mirrored = model()
        mirrored.compile(NESTINGS[nest](), "mse")
    single = model()
    single.compile(NESTINGS[nest](), "mse")
    for net in (mirrored, single):
        fit(net, epochs=2)
    for found, expected in zip(mirrored.get_weights(), single.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_non_monotonic_averages_of_a_legacy_optimizer(tmp_path):
    def compiled():
        net = model()
        net.compile(NonMonotonicASGD(legacy.SGD(RATE), 1), "mse")
        net.optimizer.build(net.trainable_variables)
        for loss in (1.0, 1.0, 2.0):
            net.optimizer.observe(loss)
        return net

    net, seen = compiled(), []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(net.get_weights())
    )
    fit(net, epochs=2, callbacks=[NonMonotonicASGDCallback("loss"), keep])
    for i, found in enumerate(net.get_weights()):
        np.testing.assert_allclose(found, np.mean([w[i] for w in seen], axis=0), atol=1e-6)
    path = tf.train.Checkpoint(model=net, optimizer=net.optimizer).write(str(tmp_path / "state"))
    again = compiled()
    state = tf.train.Checkpoint(model=again, optimizer=again.optimizer)
    state.read(path).assert_existing_objects_matched()
    assert again.optimizer.exchanged
    for optimizer in (net.optimizer, again.optimizer):
        optimizer.exchange()
    assert_same(again.get_weights(), seen[-1])


def test_a_loop_of_ones_own_with_a_loss_scale_inside():
    """The same loop as on Keras 3: `scale_loss`, then `apply`."""
    found = []
    for nest in ("inside", "none"):
        net, optimizer = model(), NESTINGS[nest]()
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((net(X) - Y) ** 2)
                scaled = optimizer.scale_loss(loss)
            weights = net.trainable_variables
            optimizer.apply(tape.gradient(scaled, weights), weights)
        found.append(net.get_weights())
    assert_same(found[0], found[1])  # the scale is a power of two


# Arguments, and what is refused.


def test_hyperparameters_are_the_wrapped_ones():
    inner = legacy.Adam(RATE, beta_1=0.5)
    optimizer = DecoupledWeightDecay(inner, D, name="mine")
    optimizer.beta_1 = 0.75
    optimizer.lr = 0.5
    assert (float(inner.beta_1), float(inner.learning_rate)) == (0.75, 0.5)
    assert optimizer.name == "mine" and optimizer.epsilon == inner.epsilon
    with pytest.raises(AttributeError, match="no_such"):
        _ = optimizer.no_such
    with pytest.raises(AttributeError, match="give a schedule, a function or a tf.Variable"):
        DecoupledWeightDecay(tfa.optimizers.LAMB(), D).weight_decay = 0.2


def test_weights_as_lists():
    optimizer, weights = DecoupledWeightDecay(legacy.Adam(RATE), D), variables("float32")
    steps(optimizer, weights)
    new = [value + 1 for value in optimizer.get_weights()]
    optimizer.set_weights(new)
    assert_same(optimizer.get_weights(), new)
    assert int(optimizer.iterations) == 4
    assert optimizer.get_slot(weights[0], "m").shape == weights[0].shape


def test_a_variable_that_has_its_first_gradient_later():
    optimizer, weights = DecoupledWeightDecay(legacy.SGD(0.0), 0.5), variables("float32")
    old = values(weights)
    grads = gradients(0, "float32")
    optimizer.apply_gradients([(grads[0], weights[0])])
    optimizer.apply_gradients(zip(grads, weights, strict=True))
    np.testing.assert_array_equal(weights[0].numpy(), old[0] * 0.25)
    np.testing.assert_array_equal(weights[1].numpy(), old[1] * 0.5)


@pytest.mark.parametrize("scale", ["absolute", "learning_rate"])
def test_unused_variables_are_decayed_when_asked(scale):
    optimizer = DecoupledWeightDecay(legacy.SGD(0.5), 0.5, scale, decay_unused=True)
    weights = variables("float32")
    old = values(weights)
    optimizer.apply([gradients(0, "float32")[0], None], weights)
    left = 0.5 if scale == "absolute" else 0.75
    np.testing.assert_array_equal(weights[1].numpy(), old[1] * left)


@pytest.mark.parametrize(
    "inner",
    [
        lambda: tfa.optimizers.LAMB(weight_decay=0.1),
        lambda: tfa.optimizers.AdamW(0.1),
        lambda: tfa.optimizers.RectifiedAdam(weight_decay=0.1),
        lambda: tfa.optimizers.Lookahead(tfa.optimizers.SGDW(0.1)),
        lambda: tfa.optimizers.SWA(DecoupledWeightDecay(legacy.SGD(), 0.1)),
        lambda: LossScale(tfa.optimizers.NovoGrad(weight_decay=0.1)),
    ],
)
def test_what_decays_already_is_refused(inner):
    with pytest.raises(ValueError, match="decays weights already .*weight_decay"):
        DecoupledWeightDecay(inner(), 0.1)


@pytest.mark.parametrize("scale", ["learning_rate", "schedule"])
def test_cocob_has_no_learning_rate(scale):
    with pytest.raises(ValueError, match="COCOB 'COCOB' has none; take scale='absolute'"):
        DecoupledWeightDecay(tfa.optimizers.COCOB(), D, scale=scale)


def test_an_optimizer_of_several_is_refused():
    net = model()
    several = tfa.optimizers.MultiOptimizer([(legacy.SGD(), net.layers[0])])
    with pytest.raises(TypeError, match="cannot follow the updates of MultiOptimizer"):
        DecoupledWeightDecay(several, D)


def test_what_cannot_be_inside_an_average_says_so():
    grads, weights = gradients(0, "float32"), variables("float32")
    unused = DecoupledWeightDecay(legacy.SGD(), D, decay_unused=True)
    for inner, words in (
        (unused, "decay_unused=True is of all of them: put DecoupledWeightDecay around"),
        (NonMonotonicASGD(legacy.SGD()), "put NonMonotonicASGD around the average"),
    ):
        optimizer = tfa.optimizers.Lookahead(inner)
        with pytest.raises(ValueError, match=words):
            optimizer.apply_gradients(zip(grads, weights, strict=True))


def test_a_pattern_that_matches_nothing_lists_the_paths():
    optimizer, weights = DecoupledWeightDecay(legacy.Adam(), D, exclude="gamma"), variables()
    with pytest.raises(ValueError, match="exclude pattern 'gamma' matches no variable; .*: kernel"):
        optimizer.apply(gradients(0), weights)
    assert not optimizer.built and not optimizer.optimizer.weights
