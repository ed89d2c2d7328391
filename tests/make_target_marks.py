"""Marks of tests by target, and the memory of the workers."""

import contextlib
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest


def mark_extended_rows(items: list[pytest.Item], check: bool) -> None:
    """Marks each row as extended that its test's `quick_rows` does not name.

    Args:
        items: the collected tests.
        check: True if an unknown id is an error. False if the command line names single rows.

    Raises:
        pytest.UsageError: an id of `quick_rows` fits no row.
    """
    tables = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("quick_rows"):
            tables[item.nodeid.split("[")[0], mark.args].append(item)
    for (test, ids), rows in tables.items():
        names = {item: _row(item) for item in rows}
        for item, name in names.items():
            if not any(_fits(name, pattern) for pattern in ids):
                item.add_marker("extended")
        for pattern in ids:
            if check and not any(_fits(name, pattern) for name in names.values()):
                raise pytest.UsageError(
                    f"quick_rows of {test} names {pattern!r}, which is none of its rows: "
                    f"{', '.join(names.values())}"
                )


def skip_half_precision(items: list[pytest.Item]) -> None:
    """Skips tests in half precision on an AVX-512 processor that computes as one without.

    TensorFlow asks the processor for AVX-512, and oneDNN obeys the setting. So a product of two
    bfloat16 matrices, `tf.matmul(x, x)`, ends the process, also without tfwd. On processors with
    AVX-512 for float16, a product of two float16 matrices does so too.
    """
    dtypes = ["bfloat16"]
    with contextlib.suppress(OSError):  # only Linux has the file
        if "avx512_fp16" in Path("/proc/cpuinfo").read_text("utf-8").split():
            dtypes.append("float16")
    reason = "TensorFlow's products in half precision end the process under ONEDNN_MAX_CPU_ISA"
    for item in items:
        if any(dtype in item.nodeid or item.get_closest_marker(dtype) for dtype in dtypes):
            item.add_marker(pytest.mark.skip(reason=reason))


def peak_memory() -> int:
    """Returns the largest resident memory of this process so far, in bytes; 0 on Windows."""
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _row(item: pytest.Item) -> str:
    """Returns the text in the brackets of a test's name."""
    return item.nodeid.split("[", 1)[1].removesuffix("]")


def _fits(name: str, pattern: str) -> bool:
    """Checks whether a row has an id, in which `*` stands for any text and nothing else does."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None
