"""The peak memory of a step, in a process of its own.

What is measured is the resident set of the process: its peak during the step less its level just
before. Linux keeps the peak as VmHWM and sets it back on request (/proc/self/clear_refs); then
every step has a figure of its own, and the first ones, which trace and compile, are left out.
Elsewhere the peak is ru_maxrss, which never falls: there the figure is that of all steps together,
the first one included.

Freed memory must leave the process for that. TensorFlow on x86 keeps what was freed in a pool of
its own; it is told to use the system's allocator, and that of glibc to give back at once what is
larger than a megabyte. So the figure is what is alive, without what a pool keeps beside it.

A process begins as a fork of one that has loaded TensorFlow and done nothing with it, which is as
good as a fresh one and three seconds earlier.
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

import measure

MIB = 1 << 20
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(MIB),
    "MALLOC_TRIM_THRESHOLD_": str(MIB),
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
}
CLEAR = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


def can_reset() -> bool:
    """Whether this process can set its peak back."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return STATUS.exists()


def method() -> str:
    """What is measured on this machine, in words."""
    if can_reset():
        return "VmHWM during a step, less VmRSS before it"
    return "growth of ru_maxrss from before the first step"


def _status(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")


def resident() -> int:
    """Returns the present resident set in bytes, after free memory was given back.

    If the system does not report it, the largest resident set so far is returned.
    """
    _give_back()
    return _status("VmRSS") if STATUS.exists() else _largest()


def _largest() -> int:
    """The largest resident set so far, bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _give_back() -> None:
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def peaks(step: Callable[[], Any], steps: int = 3, warmup: int = 1) -> list[int]:
    """The bytes by which each of the steps raised this process's resident set, at most.

    Args:
        step: runs one step, and waits for it.
        steps: how many are measured.
        warmup: how many run before; where the peak cannot be set back they are measured too.

    Returns:
        A figure a step, or a single one where the peak cannot be set back.
    """
    if not can_reset():
        _give_back()
        level = _largest()
        for _ in range(warmup + steps):
            step()
        return [_largest() - level]
    for _ in range(warmup):
        step()
    found = []
    for _ in range(steps):
        _give_back()
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
    """What a child sends within the time; a text if it does not. It has ended then."""
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
    """The peaks of one step of each configuration, a process each.

    Args:
        make: a function of a module's top level; `make(*arguments)` returns the step.
        configurations: the arguments by the configuration's name.
        steps: the steps that are measured; None if what `make` returns measures for itself.
        seconds: a child that takes longer is ended.
        at_once: children that run beside one another, most of whose time is tracing. What a process
            holds does not depend on the others.
        preload: what the process that the children are forks of has loaded.

    Returns:
        By name, bytes a step, or what was measured; a text if it failed.
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
