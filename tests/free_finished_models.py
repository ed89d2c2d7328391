"""Memory of a test process: models of finished tests are freed early.

TensorFlow keeps the graph of each training step, and with it the model (`docs/memory.md`).
`tfwd.release_models` turns these objects into garbage. A collection takes longer than most
tests, so it runs only when the process has grown.
"""

import ctypes
import gc
import os
from pathlib import Path

from tfwd._graph import custom_gradient

STATM = Path("/proc/self/statm")
GROWTH = 200 << 20  # bytes by which the process may grow between two collections
TESTS = 50  # number of tests between two collections, where the size is unknown

_size = _tests = 0


def forget() -> None:
    """Frees the models of finished tests; called after each test."""
    global _size, _tests
    _tests += 1
    custom_gradient.release_models()
    if not _has_grown():
        return
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
    _size, _tests = resident(), 0


def resident() -> int:
    """Returns the bytes of memory of this process; 0 if they are unknown."""
    if not STATM.exists():
        return 0
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _has_grown() -> bool:
    global _size
    size = resident()
    _size = _size or size
    return size - _size > GROWTH if size else _tests >= TESTS
