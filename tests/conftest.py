"""Set-up of every test: a quiet TensorFlow on two CPU devices, and a fresh Keras.

The environment is set before TensorFlow and Keras are imported, because both read it only then.
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# A user's keras.json may set another backend or float type, so tests have an empty home.
os.environ["KERAS_HOME"] = str(ROOT / ".pytest_cache" / "keras")
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["MPLBACKEND"] = "agg"
# Exact comparisons need one kind of device; tests of replicas need two devices on every machine.
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
# PyTorch's builds for GPUs load Triton, whose LLVM ends a process that has TensorFlow's.
sys.modules.setdefault("triton", None)  # type: ignore[arg-type]

import free_finished_models
import hypothesis
import keras
import keras3_names_on_keras2
import make_target_marks
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2

if IS_KERAS_2:
    keras3_names_on_keras2.install()

PEAKS = pytest.StashKey[dict[str, int]]()

# The load of a machine is no property of the code.
hypothesis.settings.register_profile("tfwd", deadline=None)
hypothesis.settings.load_profile("tfwd")

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker would otherwise start a thread for each core.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)


def pytest_configure(config: pytest.Config) -> None:
    if IS_KERAS_2:
        # Python and NumPy have deprecated uses in TensorFlow 2.15 and its Keras.
        config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")
        config.addinivalue_line("filterwarnings", "ignore::PendingDeprecationWarning")
        # A layer of Keras 2 calls one initializer for several weights.
        unseeded = "ignore:The initializer .* is unseeded and being called multiple times"
        config.addinivalue_line("filterwarnings", unseeded)
        # tensorflow-addons tells of its end, and of the range of versions that it was tested with.
        config.addinivalue_line("filterwarnings", "ignore::UserWarning:tensorflow_addons")
        config.addinivalue_line("filterwarnings", "ignore:\\s*TensorFlow Addons:UserWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the rows of tables that `make test` leaves out, before `-m` chooses."""
    # Keras 2 lacks some rows, and one row may be asked for by its name.
    single = any("[" in argument for argument in config.args)
    make_target_marks.mark_extended_rows(items, check=not single and not IS_KERAS_2)
    if "ONEDNN_MAX_CPU_ISA" in os.environ:
        make_target_marks.skip_half_precision(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Excludes objects that stay until the end, such as TensorFlow's million, from collection.

    The garbage collector would walk through them again and again, which took a fifth of the tests'
    time. `free_finished_models` calls it when the process has grown; otherwise it runs rarely.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 100, 100)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Makes a worker report its largest memory."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak"] = make_target_marks.peak_memory()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Stores the memory that a worker has reported."""
    if "peak" in getattr(node, "workeroutput", {}):
        node.config.stash.setdefault(PEAKS, {})[node.gateway.id] = node.workeroutput["peak"]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the largest memory of each worker."""
    if peaks := config.stash.get(PEAKS, {}):
        each = ", ".join(f"{name} {peak / 2**30:.2f} GiB" for name, peak in sorted(peaks.items()))
        terminalreporter.write_line(f"peak memory: {each}")


@pytest.fixture(autouse=True, scope="module")
def collected() -> Iterator[None]:
    """Frees the objects of earlier files, and keeps TensorFlow's and Keras's from the collector.

    It runs at the start of a file, since pytest still holds the last test's arguments at the end.
    Objects that are set apart are never freed.
    """
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(autouse=True)
def fresh_keras(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sets the same layer names, random numbers and float types, whichever tests ran before."""
    _reset()
    for value in vars(request.module).values():
        if isinstance(value, np.random.Generator):
            value.bit_generator.state = np.random.default_rng(2).bit_generator.state
    yield
    _reset()
    free_finished_models.forget()


def _reset() -> None:
    # Without garbage collection, which takes longer than most tests.
    if IS_KERAS_2:
        keras.backend.clear_session()
    else:
        keras.backend.clear_session(free_memory=False)
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tfwd draw every weight as a large one, and again in backward."""
    from tfwd._random import masks_and_normals

    monkeypatch.setattr(masks_and_normals, "SMALL", 0)


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest) -> str:
    """Runs a test twice: every weight is treated as a small one, and as a large one."""
    if request.param == "large":
        request.getfixturevalue("all_large")
    return request.param


@pytest.fixture(scope="session")
def root() -> Path:
    """Returns the top of the checkout."""
    return ROOT
