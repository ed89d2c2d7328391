"""Peak memory of a step, in a process of its own.

The figure is the peak of the resident set during the step, minus its level just before. Linux keeps
the peak as VmHWM and resets it on request (/proc/self/clear_refs). Then every step has a figure of
its own, and the first steps, which trace and compile, are left out. On other systems the peak is
ru_maxrss, which never falls. There is one figure for all steps then, including the first.

Freed memory must leave the process. TensorFlow on x86 keeps freed memory in a pool of its own, so
it is told to use the system's allocator. The allocator of glibc is told to return blocks of more
than a megabyte at once. So the figure counts live memory, without the free memory of a pool.

A process begins as a fork of a process that has imported TensorFlow and not used it. That is as
good as a new process, and three seconds faster.
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
    """Checks whether this process can reset its peak."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return STATUS.exists()


def method() -> str:
    """Returns in words how memory is measured on this machine."""
    if can_reset():
        return "VmHWM during a step, less VmRSS before it"
    return "growth of ru_maxrss from before the first step"


def _status(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")


def resident() -> int:
    """Returns the resident set in bytes, after free memory was given back.

    Returns the largest resident set so far on systems that do not report the current one.
    """
    give_back()
    return _status("VmRSS") if STATUS.exists() else _largest()


def _largest() -> int:
    """Returns the largest resident set so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def give_back() -> None:
    """Collects garbage, and returns free memory to the system where glibc can."""
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def peaks(step: Callable[[], Any], steps: int = 3, warmup: int = 1) -> list[int]:
    """Returns by how many bytes each step raised the resident set of this process at its peak.

    Args:
        step: runs one step, and waits for it.
        steps: number of measured steps.
        warmup: number of steps before. They are measured too if the peak cannot be reset.

    Returns:
        A figure for each step, or a single figure if the peak cannot be reset.
    """
    if not can_reset():
        give_back()
        level = _largest()
        for _ in range(warmup + steps):
            step()
        return [_largest() - level]
    for _ in range(warmup):
        step()
    found = []
    for _ in range(steps):
        give_back()
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


def _answer(child: Any, answer: Any, seconds: float) -> Any:
    """Returns the answer of a child, or a text if there is none within the time; ends the child."""
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
    """Measures the peak of one step of each configuration, each in a process of its own.

    Args:
        make: a function of a module's top level; `make(*arguments)` returns the step.
        configurations: the arguments by the configuration's name.
        steps: number of measured steps. None: the function that `make` returns measures by itself.
        seconds: a child that takes longer is ended.
        at_once: number of children that run at the same time. Most of their time is tracing, and
            the memory of a process does not depend on the others.
        preload: modules that the children's parent imports.

    Returns:
        By name, the bytes of each step or the child's own results; a text if it failed.
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
        found = _answer(child, answer, seconds)
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
