"""Random models against plain Keras, for any length of time: `make fuzz`.

    python tests/fuzz/run.py --minutes 60 [--seed N] [--jobs 1] [--into FOLDER]

Some dozens of cases share a process, because TensorFlow keeps every model that it traced. Each
failure is made small, and is printed as a script that shows it. The scripts are also written into
the folder. The exit code is 1 if there was a failure.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASES = 40  # in a process


def main() -> int:
    arguments = parsed()
    if arguments.child:
        return child(arguments)
    end = time.monotonic() + 60 * arguments.minutes
    seed, running, codes, spent = arguments.seed, {}, [], 0
    while time.monotonic() < end or running:
        while time.monotonic() < end and len(running) < arguments.jobs:
            left = end - time.monotonic()
            command = [sys.executable, __file__, "--child", "--seed", str(seed)]
            command += ["--minutes", str(left / 60), "--into", str(arguments.into)]
            command += ["--cases", str(arguments.cases), "--runs", arguments.runs]
            command += ["--in-place"] * arguments.in_place
            running[subprocess.Popen(command)] = seed
            seed += 1
        time.sleep(0.2)
        for process in [p for p in running if p.poll() is not None]:
            if process.returncode not in (0, 1):
                print(f"seed {running[process]}: the process ended with {process.returncode}")
            codes.append(process.returncode)
            del running[process]
            spent += 1
    failed = sum(code != 0 for code in codes)
    print(f"{spent} processes, seeds {arguments.seed} to {seed - 1}; {failed} found something")
    return int(failed > 0)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Random models against plain Keras.")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to go on")
    parser.add_argument("--seed", type=int, default=0, help="the first process's seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--into", type=Path, default=Path("fuzz-failures"), help="for scripts")
    parser.add_argument("--cases", type=int, default=CASES, help="cases in a process")
    parser.add_argument("--runs", default="", help="some of the modes, with commas between them")
    parser.add_argument("--in-place", action="store_true", help="only parametrizations in place")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def child(arguments: argparse.Namespace) -> int:
    """Runs the cases of one seed."""
    prepare()
    from fuzz import cases, failure_script, failure_search

    now = failure_search.Hunt(arguments.seed)
    until = time.monotonic() + 60 * arguments.minutes
    runs = tuple(arguments.runs.split(",")) if arguments.runs else cases.RUNS
    in_place = (True,) if arguments.in_place else cases.IN_PLACE
    for number, failure in enumerate(now.run(arguments.cases, until, runs, in_place)):
        text = failure_script.script(failure.case, failure.found)
        arguments.into.mkdir(parents=True, exist_ok=True)
        path = arguments.into / f"seed_{arguments.seed}_{number}.py"
        path.write_text(text, "utf-8")
        shown = text if arguments.jobs == 1 else ""
        print(f"{path}:\n{shown}\n{path}: {failure.found}", flush=True)
    said = [f"{many} times: {what}" for what, many in now.counts.items()]
    modes = ", ".join(f"{many} {mode}" for mode, many in sorted(now.by_mode.items()))
    print(
        f"seed {arguments.seed}: {now.ran} cases ({modes}); {len(now.no_model)} that plain Keras "
        f"cannot run; {'; '.join(said) or 'no difference'}",
        flush=True,
    )
    return int(bool(now.counts))


def prepare() -> None:
    """Prepares a process without pytest as tests/conftest.py does."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    sys.path[:1] = [str(HERE.parent)]  # in place of this folder
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)


if __name__ == "__main__":
    sys.exit(main())
