"""Random models on effective weights against plain Keras on the same weights.

Keras 3 has 18 random cases, of which six are fast, and Keras 2 has twelve others.
`tests/fuzz/run.py` runs for any length of time.
"""

from pathlib import Path

import keras
import numpy as np
import pytest
from stack_marks import IS_KERAS_2, quick_rows
from tables_by_make_target import with_slow_rest
from watched_processes import Processes, finish

from fuzz import failure_script, failure_search, model_inputs, shrink, training_modes
from fuzz.cases import Mode
from fuzz.former_defects import KNOWN

CASES = 6  # in a test
SEEDS = [
    pytest.param(seed, marks=[pytest.mark.slow] * (seed > 0))
    for seed in (range(10, 12) if IS_KERAS_2 else range(3))
]


def report(case, found):
    return "\n".join([*found, "This script shows it:", failure_script.script(case, found)])


# The others also have tests of their own. They are here to test the fuzzer.
KEPT = (
    "self-attention in a graph",
    "a compiled model wrapped whole",
    "a cell with a call of its own",
    "a tensor told by an attribute",
    "a static time axis in a loop",
    "a mask and first states",
    "attention twice on one masked tensor",
    "a vector, and a sublayer built late",
    "a float32 layer in a half one",
    "one of two equal layers with two in place",
    "two in place around own code",
)


@quick_rows(
    "self-attention in a graph",
    "a cell with a call of its own",
    "a mask and first states",
    "a vector, and a sublayer built late",
    "a float32 layer in a half one",
    "two in place around own code",
)
@pytest.mark.parametrize("name", with_slow_rest(KNOWN, KEPT))
def test_a_defect_that_there_was(name: str) -> None:
    found = shrink.found_in(KNOWN[name], must_run=True)
    assert not found, report(KNOWN[name], found)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_models(seed: int) -> None:
    now = failure_search.Hunt(seed, seconds=30, again=1)
    for failure in now.run(CASES):
        pytest.fail(report(failure.case, failure.found))
    assert now.ran == CASES, now.no_model


def test_float16_skips_no_step() -> None:
    # Gradients of up to 17, which float16 cannot hold 32768 times.
    model_inputs.set_policy("mixed_float16")
    try:
        inputs = keras.Input((3, 4), batch_size=model_inputs.BATCH)
        model = keras.Model([inputs], [keras.layers.Dense(4)(inputs)])
        start = [np.full((4, 4), 8.0), np.zeros(4)]
        record = training_modes.run(
            model, "s", [(2, 3, 4)], Mode("fit", policy="mixed_float16"), start
        )
        [x], [y] = model_inputs.inputs("s", 0), model_inputs.targets([(2, 3, 4)], 0)
    finally:
        model_inputs.set_policy("float32")
    x, y = (np.reshape(t, (-1, 4)).astype(np.float64) for t in (x, y))
    gradient = x.T @ (2 * (x @ start[0] - y) / y.size)
    assert np.abs(gradient).max() > 2
    found = np.asarray(record.weights[0][0])
    np.testing.assert_allclose(found, start[0] - model_inputs.RATE * gradient, rtol=5e-3)


@pytest.mark.slow
def test_a_script_needs_no_file_of_the_tests(tmp_path: Path) -> None:
    path = tmp_path / "case.py"
    path.write_text(failure_script.script(KNOWN[next(iter(KNOWN))], ["nothing"]))
    with Processes() as processes:
        code, output = finish(processes.python(f"import runpy; runpy.run_path({str(path)!r})"))
    assert code == 0 and "no difference" in output, output
