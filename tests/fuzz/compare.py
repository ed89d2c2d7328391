"""Comparison of a case on the wrapped model and on the oracle."""

import contextlib
import functools
import re
import warnings
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from fuzz import drawn_weights, model_inputs, training_modes
from fuzz.given_weights import IS_KERAS_2, flatten
from fuzz.oracle import Oracle
from tfwd._random import masks_and_normals

# Error by rounding, as a share of the largest value.
TOLERANCE = {"float64": 1e-6, "float32": 5e-4, "mixed_float16": 5e-2, "mixed_bfloat16": 4e-1}
# In two steps from weights near 1.
LARGE = 1e4


class NoModel(Exception):
    """An error for a case that is no model, or that plain Keras cannot run in this way."""


def clear():
    """Starts a fresh Keras: layer names begin again."""
    if IS_KERAS_2:
        keras.backend.clear_session()
    else:
        keras.backend.clear_session(free_memory=False)


@functools.cache
def strategy():
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def differences(program, mode):
    """Returns the differences between the wrapped model and the oracle: a list of sentences.

    Args:
        program: `wrapped` and `plain`, functions that make the two models, and `INPUTS`, the types
            of their inputs, a letter each.
        mode: a `cases.Mode`.

    Raises:
        NoModel: plain Keras cannot make or run the case.
    """
    clear()
    keras.utils.set_random_seed(0)
    limit = mock.patch.object(masks_and_normals, "SMALL", mode.small)
    with limit, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_inputs.set_policy(mode.policy)
        try:
            return _differences(program, mode)
        finally:
            model_inputs.set_policy("float32")


def _differences(program, mode):
    letters, make_wrapped, make_plain = (program[n] for n in ("INPUTS", "wrapped", "plain"))
    given = model_inputs.inputs(letters, 0)
    try:
        plain = make_plain()
        shapes = [tuple(t.shape) for t in _outputs(plain, letters, given, False)]
    except Exception as error:
        raise NoModel(f"plain Keras cannot make it: {error}") from error
    if mode.run == "replicas" and _keeps_states(plain):
        raise NoModel("in plain Keras too, replicas do not keep states of their own")
    if mode.tensor_flag and _differs_by_flag(plain, letters, given):
        raise NoModel("plain Keras itself has other outputs if the training flag is a tensor")
    drops = any(type(layer) is keras.layers.Dropout for layer in flatten(plain))
    if drops and (mode.run.endswith("xla") or mode.run == "replicas"):
        raise NoModel("Keras's own Dropout draws otherwise there than in eager mode")
    model_inputs.forget(plain)
    start = model_inputs.weights(plain)
    try:
        with _place(mode):
            wrapped = make_wrapped()
            # A functional model has its weights from the start, a subclassed one from a call.
            made = len(model_inputs.made(wrapped))
            if not made and mode.fresh and _can_be_fresh(wrapped, mode):
                start = None
            elif made < len(plain.weights):
                training_modes.call(wrapped, letters, given, False)
            if start is not None:
                model_inputs.forget(wrapped)
        if mode.run == "replicas":
            records = training_modes.in_replicas(wrapped, letters, shapes, mode, strategy(), start)
        else:
            records = [training_modes.run(wrapped, letters, shapes, mode, start)]
    except Exception as error:
        asked = re.search("'(.*)' matches no weight of model", str(error))
        if asked and not any(re.fullmatch(asked[1], drawn_weights.path(v)) for v in plain.weights):
            raise NoModel(str(error)) from error
        _tried_plain(make_plain, letters, shapes, mode, given)
        head = str(error).strip().split("\n")
        return [f"raises {type(error).__name__}: {' | '.join(head[:3])[:600]}"]
    found = list(_counted(wrapped))
    many = max(
        [int(w.calls) for those in drawn_weights.wrappers(wrapped).values() for w in those] + [0]
    )
    factors = drawn_weights.factors(wrapped, many)
    found += drawn_weights.unlawful(wrapped, factors)
    oracle = Oracle(plain, factors)
    half = any("16" in str(x.compute_dtype) for x in flatten(plain))
    tolerance = max(TOLERANCE[mode.policy], TOLERANCE["mixed_float16"] if half else 0)
    # Differences see the rounding of a part in half precision, and what goes from one call of a
    # layer to its next one by its states, which has no gradient.
    sloped = not half and not _keeps_states(plain)
    for replica, record in enumerate(records):
        if replica and not mode.share:
            continue  # its draws are its own, and no function of the library returns them
        oracle.restart(record.start)
        try:
            untaped = training_modes.is_untaped(mode, start)
            expected = oracle.run(letters, shapes, mode, replica, untaped)
        except IndexError:
            return [*found, "plain Keras calls a layer more often than the wrapped model drew"]
        except Exception as error:
            raise NoModel(f"plain Keras cannot run it: {error}") from error
        reached = [x for values in expected.weights + expected.outputs for x in values]
        if not all(np.abs(x).max(initial=0) < LARGE for x in reached):
            raise NoModel("plain Keras diverges, by which rounding becomes anything")
        if mode.policy == "mixed_float16" and mode.run.startswith("fit") and _overflows(expected):
            raise NoModel("Keras may skip a step, because scaled gradients overflow in float16")
        found += _compared(record, expected, tolerance, sloped)
        found += _calls_differ(wrapped, oracle)
    if not found and mode.run != "replicas":
        found += _evaluation_differs(wrapped, oracle, letters, mode)
    return found


def _overflows(expected):
    """Checks for gradients that may overflow in float16 when Keras scales the loss.

    The gradient of a layer's output may exceed the gradients of the weights. The limit therefore
    has a margin of 16.
    """
    sizes = [np.abs(np.asarray(g)).max(initial=0) for step in expected.of_weights for g in step]
    limit = np.finfo(np.float16).max / training_modes.LOSS_SCALE / 16
    return max(sizes, default=0) > limit


def _differs_by_flag(plain, letters, given):
    """Checks whether a plain model has other outputs in evaluation if its flag is a tensor."""
    found = []
    for flag in (False, tf.constant(False)):
        model_inputs.forget(plain)
        found.append(training_modes.values(_outputs(plain, letters, given, flag)))
    return not all(np.allclose(a, b, equal_nan=True) for a, b in zip(*found, strict=True))


def _outputs(model, letters, given, flag):
    return model_inputs.flat(training_modes.call(model, letters, given, flag))


def _place(mode):
    return strategy().scope() if mode.run == "replicas" else contextlib.nullcontext()


def _can_be_fresh(model, mode):
    """Checks whether the first call can be the training call.

    Changes of that call are not known before it.
    """
    # And Keras's first call of a Block in another model does not tell it the flag of that call.
    kept = ("BatchNormalization", "Sums", "Dropout", "LSTMStateful", "Block")
    held = {type(layer).__name__ for layer in flatten(model)}
    known = not _keeps_states(model) and not held & set(kept)
    return mode.run in ("eager", "function", "xla") and known


def _keeps_states(model):
    return any(getattr(layer, "stateful", False) for layer in flatten(model))


def _tried_plain(make_plain, letters, shapes, mode, given):
    """Raises NoModel if the plain model fails in this mode too.

    A plain layer gets a tensor flag unchanged; a wrapped layer runs in a branch for each value.
    """
    for way in (lambda model: model, training_modes.Branching)[: 1 + mode.tensor_flag]:
        try:
            with _place(mode):
                plain = make_plain()
                training_modes.call(plain, letters, given, False)
                model_inputs.forget(plain)
            start = model_inputs.weights(plain)
            if mode.run == "replicas":
                training_modes.in_replicas(way(plain), letters, shapes, mode, strategy(), start)
            else:
                training_modes.run(way(plain), letters, shapes, mode, start)
        except Exception as error:
            raise NoModel(f"plain Keras cannot run it in this mode: {error}") from error


def _compared(record, expected, tolerance, sloped):
    """Returns the differences between two records."""
    found = []
    if record.dtypes and record.dtypes != expected.dtypes:
        found.append(f"outputs are {record.dtypes}, {expected.dtypes} expected")
    if not record.weights:  # replicas, which make no updates
        expected.weights, expected.states = [], []
    for what in ("outputs", "losses", "of_inputs", "of_weights", "weights", "states"):
        for number, (one, other) in enumerate(
            zip(getattr(record, what), getattr(expected, what), strict=False)
        ):
            if one is None:
                continue
            one, other = (x if isinstance(x, list) else [np.asarray(x)] for x in (one, other))
            found += _apart(f"{what}, step {number}", one, other, tolerance)
    slope = getattr(expected, "slope", None) if sloped else None
    if slope and abs(slope[0] - slope[1]) > 1e-5 * (1 + abs(slope[0])):
        found.append(f"the oracle's own slope {slope[1]:.8g} is {slope[0]:.8g} by differences")
    return found


def _apart(what, one, other, tolerance):
    if len(one) != len(other):
        return [f"{what}: {len(one)} of them, {len(other)} expected"]
    scale = max([1.0, *(np.abs(x).max(initial=0) for x in other)])
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        if a.shape != b.shape:
            return [f"{what} [{index}]: shape {a.shape}, {b.shape} expected"]
        off = np.abs(a - b)
        if not np.array_equal(np.isnan(a), np.isnan(b)) or np.nanmax(off, initial=0) > (
            tolerance * scale
        ):
            worst = np.unravel_index(np.argmax(np.nan_to_num(off, nan=np.inf)), off.shape)
            return [f"{what} [{index}] at {tuple(map(int, worst))}: {a[worst]:.8g}, "
                    f"{b[worst]:.8g} expected"]  # fmt: skip
    return []


def _counted(wrapped):
    """Checks that wrappers around one layer count alike."""
    for name, those in drawn_weights.wrappers(wrapped).items():
        counts = {int(w.calls) for w in those}
        if len(counts) > 1:
            yield f"the wrappers of '{name}' have counted {sorted(counts)} calls"


def _calls_differ(wrapped, oracle):
    for name, those in drawn_weights.wrappers(wrapped).items():
        if int(those[-1].calls) != oracle.calls[name]:
            yield f"'{name}' drew {int(those[-1].calls)} times in {oracle.calls[name]} calls"


def _evaluation_differs(wrapped, oracle, letters, mode):
    """Checks that evaluation equals the plain layer's, to the last bit."""
    oracle.feeds = False
    plain = oracle.model
    model_inputs.set_weights(wrapped, [np.asarray(v) for v in plain.weights])
    model_inputs.forget(wrapped)
    model_inputs.forget(plain)
    given = model_inputs.inputs(letters, 0)
    flag = None if mode.slope else False
    one, other = (
        training_modes.values(_outputs(m, letters, given, flag)) for m in (wrapped, plain)
    )
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        if not np.array_equal(a, b, equal_nan=True):
            return [f"evaluation, output {index}: off by {np.abs(a - b).max():.3g}"]
    return []
