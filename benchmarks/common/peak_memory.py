"""Peak memory of a step in a separate process.

The figure is the peak of the resident set during the step, minus its level just before. Linux has
the peak as VmHWM and resets it on request (/proc/self/clear_refs). Every step then has its own
figure, and the first steps, which trace and compile, are not measured. On other systems the peak is
ru_maxrss, which never decreases. There is then one figure for all steps, including the first step.

Freed memory must leave the process. TensorFlow on x86 keeps freed memory in its own pool. So an
environment variable makes it use the system's allocator. Other variables make glibc's allocator
return blocks of more than a megabyte immediately. So the figure counts only memory in use.

A process begins as a fork of a process that has imported TensorFlow and not used it. A fork gives
the same results as a new process, and starts three seconds faster.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import queue
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import measure

MIB = 1 << 20
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(MIB),
    "MALLOC_TRIM_THRESHOLD_": str(MIB),
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
}
CLEAR = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


def can_reset() -> bool:
    """Returns True if this process can reset its peak."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return STATUS.exists()


def method_text() -> str:
    """Returns a text that says how memory is measured on this machine."""
    if can_reset():
        return "VmHWM during a step, less VmRSS before it"
    return "growth of ru_maxrss from before the first step"


def _status(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")


def resident() -> int:
    """Returns free memory to the system, and returns the size of the resident set in bytes.

    On systems that do not report it, the result is the largest resident set so far.
    """
    release_free_memory()
    return _status("VmRSS") if STATUS.exists() else _largest()


def _largest() -> int:
    """Returns the largest resident set so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def release_free_memory() -> None:
    """Collects garbage, and returns free memory to the system if the C library is glibc."""
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def peaks(step: Callable[[], Any], steps: int = 3, warmup: int = 1) -> list[int]:
    """Returns the bytes of each step: the peak of the resident set minus its size before the step.

    Args:
        step: Function that runs one step, and waits for it.
        steps: Number of measured steps.
        warmup: Number of steps before. They are measured too if the peak cannot be reset.

    Returns:
        A list with a figure for each step, or with a single figure if the peak cannot be reset.
    """
    if not can_reset():
        release_free_memory()
        level = _largest()
        for _ in range(warmup + steps):
            step()
        return [_largest() - level]
    for _ in range(warmup):
        step()
    found = []
    for _ in range(steps):
        release_free_memory()
        level = _status("VmRSS")
        CLEAR.write_text("5")
        step()
        found.append(max(_status("VmHWM") - level, 0))
    return found


def _child(
    make: Callable[..., Any], arguments: tuple, steps: int | None, answer: multiprocessing.Queue
) -> None:
    try:
        made = make(*arguments)
        answer.put(made() if steps is None else peaks(made, steps))
    except BaseException as error:
        traceback.print_exc()
        answer.put(f"{type(error).__name__}: {error}".splitlines()[0][:200])


def _shown(answer: Any) -> str:
    if isinstance(answer, list) and not isinstance(answer[0], int):
        return f"{len(answer)} samples"
    if not isinstance(answer, list):
        return str(answer)
    return " ".join(f"{peak / MIB:.0f}" for peak in answer) + " MiB"


def _await_result(child: Any, answer: Any, seconds: float) -> Any:
    """Returns the answer of a child, or a text if it does not answer in time. Ends the child."""
    end = time.monotonic() + seconds
    found = None
    while found is None and time.monotonic() < end:
        ended = not child.is_alive()
        try:
            found = answer.get(timeout=0.5)
        except queue.Empty:
            if ended:
                return f"ended with status {child.exitcode} and no answer"
    child.join(10 if found is not None else 0)
    if child.is_alive():
        child.kill()
        child.join()
    return f"no answer within {seconds:g} s" if found is None else found


def in_children(
    make: Callable[..., Callable[[], Any]],
    configurations: Mapping[str, tuple],
    *,
    steps: int | None = 3,
    seconds: float = 180.0,
    at_once: int = 2,
    preload: Sequence[str] = ("tensorflow", "keras", "tfwd.layers"),
) -> dict[str, Any]:
    """Measures the peak of one step of each configuration, each in a separate process.

    Args:
        make: Function at the top level of a module. `make(*arguments)` returns the step.
        configurations: dict from a configuration's name to the arguments.
        steps: Number of measured steps. If it is None, the function that `make` returns must
            return the results itself. Default 3.
        seconds: Time limit. A child that takes longer is killed.
        at_once: Number of children that run at the same time. Most of their time is tracing, and
            the memory of a process does not depend on other processes.
        preload: Modules that the parent process of the children imports.

    Returns:
        dict from a name to the bytes of each step or the child's own results. It is a text if the
        child failed.
    """
    kind = "forkserver" if sys.platform == "linux" else "spawn"
    context: Any = multiprocessing.get_context(kind)
    if kind == "forkserver":
        context.set_forkserver_preload(list(preload))
    saved = dict(os.environ)
    os.environ.update(ALLOCATOR)

    def run(name: str) -> Any:
        answer = context.Queue()
        child = context.Process(target=_child, args=(make, configurations[name], steps, answer))
        child.start()
        found = _await_result(child, answer, seconds)
        bar.advance(task)
        measure.CONSOLE.print(f"{name}: {_shown(found)}", highlight=False)
        return found

    try:
        with measure.progress() as bar, ThreadPoolExecutor(at_once) as pool:
            task = bar.add_task("memory", total=len(configurations))
            return dict(zip(configurations, pool.map(run, configurations), strict=True))
    finally:
        os.environ.clear()
        os.environ.update(saved)
