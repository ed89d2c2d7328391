"""Calls of `malformed_calls.py`: values, files and folders with one error in each."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from damaged_folders import damaged_runs, damaged_sweeps
from malformed_calls import CONFIG, SWEEP, Call

PROGRAMS = ("train", "tune", "evaluate", "generate")
VALUES = ("", "abc", "-1", "nan", "1" + "0" * 30, "[]", b"\xff")


def calls() -> list[Call]:
    """Returns all calls."""
    parts = (
        flags,
        workdirs,
        values,
        of_generate,
        configs,
        sweeps,
        texts,
        damaged_runs,
        damaged_sweeps,
        outputs,
        chiefs,
    )
    return [call for part in parts for call in part()]


def write(name: str, content: str | bytes) -> Callable[[Path], object]:
    """Returns a function that writes a file into the call's folder."""
    data = content if isinstance(content, bytes) else content.encode()
    return lambda box: (box / name).write_bytes(data)


def flags() -> Iterator[Call]:
    for program in PROGRAMS:
        for name, arguments in {
            "an unknown flag": ["--wrokdir=b"],
            "an argument": ["stray"],
            "an empty argument": [""],
            "an argument that is not UTF-8": [b"\xff"],
            "a flag that is not UTF-8": [b"--\xff=3"],
            "a flag without a name": ["--=3"],
            "a flag without a value": ["--workdir"],
            "arguments after --": ["--", "more"],
            "a flag file that is not there": ["--flagfile=no.flags"],
            "a flag that says no": ["--noworkdir"],
            "a long argument": ["x" * 100_000],
        }.items():
            # absl reads flag files and ignores --noworkdir; tfwd does neither.
            yield Call(name, program, tuple(arguments), served=False)


def workdirs() -> Iterator[Call]:
    for program in PROGRAMS:
        for name, value in {
            "not UTF-8": b"\xff\xfe",
            "too long": "w" * 300,
            "below a file": "text.txt/run",
            "a file": "text.txt",
            "below a device": "/dev/null/run",
            "of the kernel": "/proc/run",
            "empty": "",
            "a link to nothing": "link",
            "a loop of links": "loop",
        }.items():
            argument = b"--workdir=" + os.fsencode(value)

            def links(box: Path) -> None:
                (box / "link").symlink_to("nowhere/at/all")
                (box / "loop").symlink_to("loop")

            yield Call(f"workdir: {name}", program, (argument,), links)


def values() -> Iterator[Call]:
    from tfwd.lm.config import KEYS

    for key in KEYS:
        for value in VALUES[key == "data.path" :]:  # without a path the text is the embedded one
            argument = os.fsencode(f"--config.{key}=") + os.fsencode(value)
            # A valid value leads to the error about the missing text.
            yield Call(f"{key}={value!r}", "train", ("--config.data.path=nowhere", argument))
        yield Call(f"{key} without a value", "train", ("--config.data.path=no", f"--config.{key}"))
    for key in (
        "",
        "model",
        "optimizer",
        "model.",
        ".",
        "optimizer.kwargs.",
        "optimizer.kwargs.a.b",
        "model.hidden_units.0",
        "model[0]",
        "seed.seed",
    ):
        yield Call(f"the key {key!r}", "train", (f"--config.{key}=1",))
    for argument in (
        "beta_1=abc",
        "beta_1=[]",
        "beta_1=None",
        "beta_1=nan",
        "epsilon=abc",
        "amsgrad=abc",
        "clipnorm=abc",
        "clipvalue=-",
        "name=3",
        "use_ema=7",
        "ema_momentum=x",
        "loss_scale_factor=abc",
        "gradient_accumulation_steps=abc",
        "momentum=0.9",
        "learning_rate=3",
        "beta_1={}",
        "beta_1=(1,2)",
        "ema_overwrite_frequency=x",
    ):
        yield Call(f"kwargs.{argument}", "train", (f"--config.optimizer.kwargs.{argument}",))
    yield Call(
        "kwargs of sgd",
        "train",
        ("--config.optimizer.name=sgd", "--config.optimizer.kwargs.momentum=abc"),
    )
    for seed in (2**32, 2**63, 2**64, 10**30):
        yield Call(f"seed={seed}", "train", (f"--config.seed={seed}",), words="seed=.*4294967295")
        yield Call(f"seed={seed}", "tune", (f"--config.seed={seed}",), words="seed=.*4294967295")
        yield Call(f"search_seed={seed}", "tune", (f"--search_seed={seed}",), words="seed")
    yield Call(
        "the largest seed",
        "train",
        ("--config.seed=4294967295",),
        served=True,
        new=False,
        prepare=lambda box: shutil.rmtree(box / "run"),
    )
    yield Call(
        "the largest seed of two runs",
        "tune",
        ("--config.seed=4294967295", "--executions_per_trial=2"),
        words="seed",
    )
    for argument in (
        "data.batch_size=9999",
        "data.eval_batch_size=9999",
        "data.window=2000000000",
        "data.min_count=2000000000",
        "model.embedding_dim=2000000000",
        "model.dtype_policy=float61",
        "model.hidden_units=2000000000",
    ):
        yield Call(argument, "train", (f"--config.{argument}",))
    yield Call(
        "steps that never come",
        "train",
        (
            "--config.model.noise_start_step=2147483647",
            "--config.training.log_steps=2147483647",
            "--config.sample.top_k=2147483647",
        ),
        lambda box: shutil.rmtree(box / "run"),
        served=True,
        new=False,
    )
    for name in (
        "max_trials",
        "executions_per_trial",
        "worker_timeout",
        "chief_timeout",
        "method",
        "search_seed",
    ):
        for value in VALUES:
            if (name, value) in (("method", ""),):
                continue  # this value is valid
            argument = os.fsencode(f"--{name}=") + os.fsencode(value)
            yield Call(f"{name}={value!r}", "tune", ("--config.data.path=nowhere", argument))


def of_generate() -> Iterator[Call]:
    wrong = {
        "tokens": ["1e23", "1" + "0" * 23, "-1", "abc", "", "nan", "1.5"],
        "temperature": ["-1", "nan", "inf", "abc", "1e400", ""],
        "top_k": ["-1", "abc", "1.5", ""],
        "seed": ["-1", "abc", "1.5", ""],
        "checkpoint": ["", "first", b"\xff"],
        "prompt": [b"\xff", b"one \xc3"],
    }
    for name, texts in wrong.items():
        for value in texts:
            argument = os.fsencode(f"--{name}=") + os.fsencode(value)
            yield Call(f"{name}={value!r}", "generate", (argument,), new=False)
    right = {
        "seed": [2**32, 2**63, 2**64, 10**30],
        "top_k": [10**30],
        "temperature": ["1e-320", "1e308", "0"],
        "prompt": ["", " ", "\n\n", "<unk> <eos>", "\x00"[:0], "ä" * 5000, "\u2028 \x0b"],
        "tokens": [0],
    }
    for name, served in right.items():
        for given in served:
            yield Call(
                f"{name}={str(given)[:20]!r}",
                "generate",
                (f"--{name}={given}",),
                served=True,
                new=False,
            )
    yield Call(
        "text that the terminal cannot show",
        "generate",
        ("--prompt=ä ☃",),
        served=True,
        new=False,
        environment={"PYTHONIOENCODING": "ascii"},
    )


def configs() -> Iterator[Call]:
    def body(*lines: str) -> str:
        return CONFIG.replace(
            "    return config", "".join(f"    {line}\n" for line in lines) + "    return config"
        )

    head = "from tfwd.lm.config import default_config\nimport ml_collections\n"
    contents: dict[str, str | bytes] = {
        "empty": "",
        "no Python": "def get_config(:",
        "not UTF-8": b"x = '\xff'\n",
        "with zeros": b"x = 1\x00\n",
        "without get_config": "x = 1\n",
        "get_config is no function": "get_config = 3\n",
        "get_config needs an argument": "def get_config(name):\n    return name\n",
        "returns None": "def get_config():\n    pass\n",
        "returns a dict": "def get_config():\n    return {}\n",
        "returns an empty config": head + "def get_config():\n"
        "    return ml_collections.ConfigDict()\n",
        "raises": "def get_config():\n    raise RuntimeError('a\\nb')\n",
        "raises without words": "def get_config():\n    raise RuntimeError\n",
        "raises what cannot be shown": "class E(Exception):\n    def __str__(self):\n"
        "        raise ValueError\ndef get_config():\n    raise E(3)\n",
        "exits": "import sys\ndef get_config():\n    sys.exit(0)\n",
        "exits at once": "raise SystemExit\n",
        "recurs": "def get_config():\n    return get_config()\n",
        "runs out of memory": "def get_config():\n    return bytearray(1 << 60)\n",
        "no optimizer": body("config.unlock()", "del config['optimizer']"),
        "no model": body("config.unlock()", "del config['model']"),
        "no kwargs": body("config.unlock()", "del config.optimizer['kwargs']"),
        "no seed": body("config.unlock()", "del config['seed']"),
        "the optimizer is a number": body(
            "config.unlock()", "del config['optimizer']", "config.optimizer = 3"
        ),
        "the optimizer is None": body(
            "config.unlock()", "del config['optimizer']", "config.optimizer = None"
        ),
        "the optimizer is a dict": body(
            "config = config.to_dict()",
            "config = ml_collections.ConfigDict(config)",
            "config.optimizer = 'sgd'",
        ),
        "kwargs is a number": body(
            "config.unlock()", "del config.optimizer['kwargs']", "config.optimizer.kwargs = 3"
        ),
        "holds itself": body("config.unlock()", "config.model.me = config"),
        "kwargs hold themselves": body("config.optimizer.kwargs.k = config.optimizer.kwargs"),
        "a key that is a number": body("config.unlock()", "config._fields[3] = 4"),
        "one more key": body("config.unlock()", "config.more = 4"),
        "a placeholder": "import ml_collections\n"
        + body(
            "config.unlock()",
            "del config['seed']",
            "config.seed = ml_collections.config_dict.required_placeholder(int)",
        ),
        "an empty placeholder": "import ml_collections\n"
        + body(
            "config.unlock()",
            "del config['seed']",
            "config.seed = ml_collections.config_dict.placeholder(int)",
        ),
        "a reference that fails": "import ml_collections\n"
        + body(
            "one = ml_collections.FieldReference(1)",
            "config.unlock()",
            "del config['seed']",
            "config.seed = one / 0",
        ),
        "frozen": "import ml_collections\n"
        + body("config.seed = -1", "config = ml_collections.FrozenConfigDict(config)"),
        "a text that is not UTF-8": body("config.sample.prompt = '\\udcff'"),
        "a path that is not UTF-8": body("config.data.path = '\\udcff'"),
        "a path with a zero": body("config.data.path = 'a\\0b'"),
        "a NumPy number": "import numpy as np\n"
        + body("config.unlock()", "del config['seed']", "config.seed = np.int64(3)"),
        "a huge number": body("config.training.patience = 10 ** 5000"),
        "a huge rate": body("config.optimizer.learning_rate = 10 ** 400"),
        "units of numbers that are none": body("config.model.hidden_units = (4, 4.5)"),
    }
    for what in (
        "object()",
        "{1, 2}",
        "b'a'",
        "lambda: 3",
        "float('nan')",
        "1j",
        "print",
        "{'a': object()}",
        "[object()]",
        "'\\udcff'",
        "10 ** 5000",
    ):
        contents[f"kwargs of {what}"] = body(f"config.optimizer.kwargs.beta_1 = {what}")
    for name, content in contents.items():
        for program in ("train", "tune"):
            yield Call(f"config: {name}", program, (), write("config.py", content))
    places: dict[str, tuple[str | bytes, Callable[[Path], object]]] = {
        "a folder": ("run", lambda box: None),
        "a pipe": ("pipe", lambda box: os.mkfifo(box / "pipe")),
        "endless": ("/dev/zero", lambda box: None),
        "a device": ("/dev/null", lambda box: None),
        "not there": ("no.py", lambda box: None),
        "an unwanted argument": ("config.py:a", lambda box: None),
        "a name that is not UTF-8": (b"\xff.py", lambda box: None),
        "a long name": ("c" * 300, lambda box: None),
        "without a name": ("", lambda box: None),
        "a colon": (":", lambda box: None),
    }
    for name, (path, prepare) in places.items():
        for program, flag in (("train", "config"), ("tune", "config"), ("tune", "sweep")):
            argument = os.fsencode(f"--{flag}=") + os.fsencode(path)
            yield Call(f"{flag}: {name}", program, (argument,), prepare)


def sweeps() -> Iterator[Call]:
    spaces = {
        "None": "None",
        "a list": "[1]",
        "empty": "{}",
        "a number": "{'model.weight_dropout': 0.5}",
        "a class": "{'model.weight_dropout': Float}",
        "a key that is a number": "{3: Float(0, 0.5)}",
        "an empty key": "{'': Float(0, 0.5)}",
        "a group": "{'model': Float(0, 0.5)}",
        "a key that is not there": "{'model.no': Float(0, 0.5)}",
        "kwargs that are not there": "{'optimizer.kwargs.no': Float(0, 0.5)}",
        "kwargs of a wrong type": "{'optimizer.kwargs.beta_1': Choice(['a', 'b'])}",
        "nothing to choose": "{'model.weight_dropout': Choice([])}",
        "a choice of one number": "{'model.weight_dropout': Choice(3)}",
        "a choice of objects": "{'optimizer.kwargs.beta_1': Choice([object(), 2])}",
        "a choice of what is no config": "{'data.path': Choice([{'a': 1}])}",
        "a choice of none": "{'data.path': Choice([None])}",
        "a choice that is not UTF-8": "{'data.path': Choice(['\\udcff'])}",
        "a range of texts": "{'model.weight_dropout': Float('a', 'b')}",
        "nan": "{'model.weight_dropout': Float(0, float('nan'))}",
        "huge": "{'data.window': Int(5, 10 ** 30)}",
        "many numbers": "{'training.patience': Int(5, 10 ** 12)}",
        "many steps": "{'model.weight_dropout': Float(0, 0.9, step=1e-12)}",
        "steps of nothing": "{'model.weight_dropout': Float(0, 0.9, step=0)}",
        "a long range": "{'optimizer.l2': Float(1e-300, 1e300, step=1 + 1e-12, log=True)}",
        "seeds": "{'seed': Choice([0, 2 ** 32])}",
        "epochs in a Hyperband": "{'training.epochs': Int(1, 3)}, method='hyperband'",
    }
    options = {
        "an object for a method": "method=object()",
        "a list for a method": "method=['grid']",
        "many runs": "executions_per_trial=10 ** 10",
        "no run": "executions_per_trial=0",
        "a part of a run": "executions_per_trial=1.5",
        "a huge factor": "method='hyperband', factor=10 ** 30",
        "iterations": "method='hyperband', iterations=10 ** 30",
        "a factor": "factor='a'",
        "a seed": "seed=2 ** 32",
        "a negative seed": "seed=-1",
        "a text for a seed": "seed='a'",
        "trials": "max_trials='a'",
        "an option": "trials=3",
    }
    space = "{'model.weight_dropout': Float(0, 0.1, step=0.1)}"
    given = {**spaces, **{name: f"{space}, {text}" for name, text in options.items()}}
    for name, text in given.items():
        content = f"{SWEEP.partition('    return')[0]}    return Sweep({text})\n"
        yield Call(f"sweep: {name}", "tune", (), write("sweep.py", content))
        if name in ("many numbers", "many steps", "huge", "many runs"):
            yield Call(f"sweep: {name}, dry", "tune", ("--dry_run",), write("sweep.py", content))
    for name, text in {
        "exits": "raise SystemExit",
        "returns None": "def get_sweep(): pass",
        "is no Python": "(",
        "has a config": CONFIG,
    }.items():
        yield Call(f"sweep: {name}", "tune", (), write("sweep.py", text))


def texts() -> Iterator[Call]:
    def sparse(box: Path) -> None:
        with open(box / "huge", "wb") as file:
            file.truncate(1 << 43)

    def folder(*names: str) -> Callable[[Path], object]:
        def make(box: Path) -> None:
            (box / "folder").mkdir()
            for name in names:
                (box / "folder" / name).write_text("one two\n" * 40)
            if len(names) == 2:
                os.mkfifo(box / "folder" / "test.txt")

        return make

    kinds: dict[str, tuple[str, Callable[[Path], object]]] = {
        "a pipe": ("pipe", lambda box: os.mkfifo(box / "pipe")),
        "endless": ("/dev/zero", lambda box: None),
        "endless and random": ("/dev/urandom", lambda box: None),
        "a device": ("/dev/null", lambda box: None),
        "not there": ("no.txt", lambda box: None),
        "empty": ("empty", write("empty", "")),
        "white": ("white", write("white", " \n\t\n")),
        "not UTF-8": ("latin", write("latin", b"one two\xff\n" * 50)),
        "UTF-16": ("wide", write("wide", "one two\n".encode("utf-16") * 50)),
        "too short": ("short", write("short", "\t\n")),
        "too large": ("huge", sparse),
        "a link to itself": ("loop", lambda box: (box / "loop").symlink_to("loop")),
        "a long name": ("t" * 300, lambda box: None),
        "of the kernel": ("/proc/self/mem", lambda box: None),
        "a socket": ("socket", _socket),
    }
    for name, (path, prepare) in kinds.items():
        yield Call(f"text: {name}", "evaluate", (f"--text={path}",), prepare, new=False)
        for program in ("train", "tune"):
            yield Call(f"text: {name}", program, (f"--config.data.path={path}",), prepare)
    for name, prepare in {
        "empty": folder(),
        "one of three": folder("train.txt"),
        "a pipe among three": folder("train.txt", "valid.txt"),
    }.items():
        yield Call(f"text: a folder, {name}", "train", ("--config.data.path=folder",), prepare)
    yield Call("text: a folder", "evaluate", ("--text=run",), new=False)
    yield Call("text: a name that is not UTF-8", "evaluate", (b"--text=\xff",), new=False)


def _socket(box: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        before = os.getcwd()
        os.chdir(box)  # socket addresses have a short limit
        made.bind("socket")
        os.chdir(before)


def outputs() -> Iterator[Call]:
    for program, new in (("train", True), ("tune", True), ("evaluate", False), ("generate", False)):
        yield Call(
            "output to a full disk", program, (), new=new, out="/dev/full", words="No space left"
        )
        yield Call(
            "help to a full disk", program, ("--help",), out="/dev/full", words="No space left"
        )
        yield Call("help to a closed pipe", program, ("--help",), out="|", served=True)
    yield Call("output to a closed pipe", "generate", (), new=False, out="|", served=True)
    yield Call("output to a closed pipe", "evaluate", (), new=False, out="|", served=True)
    yield Call("output to a closed pipe", "evaluate", ("--json",), new=False, out="|", served=True)
    for size in (1, 100, 1000, 4000, 20_000):
        for program in ("train", "tune"):
            yield Call(
                f"files of {size} bytes at most",
                program,
                (),
                new=False,
                file_size=size,
                prepare=lambda box: shutil.rmtree(box / "run"),
                kept=False,
                served=None if size > 4000 else False,
            )
        yield Call(
            f"files of {size} bytes at most, going on",
            "train",
            ("--config.training.epochs=2",),
            new=False,
            file_size=size,
            kept=False,
            served=None if size > 4000 else False,
        )


def chiefs() -> Iterator[Call]:
    def shared(name: str, address: str, port: str) -> dict[str, str]:
        return {
            "KERASTUNER_TUNER_ID": name,
            "KERASTUNER_ORACLE_IP": address,
            "KERASTUNER_ORACLE_PORT": port,
        }

    for name in ("chief", "worker"):
        for port in ("", "0", "-1", "65536", "abc", "1.5", "80a", " ", "9" * 30):
            yield Call(
                f"{name}: port {port!r}",
                "tune",
                (),
                environment=shared(name, "127.0.0.1", port),
                words="KERASTUNER_ORACLE_PORT",
            )
        for address in (
            "",
            "999.1.1.1",
            "no.such.host.invalid",
            "a b",
            "127.0.0.1:80",
            "::1",
            "\udcff",
            "x" * 300,
        ):
            yield Call(
                f"{name}: address {address[:20]!r}",
                "tune",
                (),
                environment=shared(name, address, "8000"),
                words="KERASTUNER_ORACLE_IP",
            )
        yield Call(
            f"{name}: not all variables",
            "tune",
            (),
            environment={"KERASTUNER_ORACLE_IP": "127.0.0.1"},
            words="must be set",
        )
    yield Call(
        "chief: an address of another machine",
        "tune",
        (),
        environment=shared("chief", "192.0.2.1", "8000"),
        words="192.0.2.1",
    )
    yield Call(
        "worker: a chief that never comes",
        "tune",
        ("--chief_timeout=2",),
        environment=shared("worker", "127.0.0.1", "1"),
        words="waiting for the chief",
    )
    yield Call(
        "worker: an address that nobody has",
        "tune",
        ("--chief_timeout=2",),
        environment=shared("worker", "192.0.2.1", "8000"),
        words="192.0.2.1",
    )
    yield Call(
        "worker: a name that is not UTF-8",
        "tune",
        (),
        environment=shared("\udcff", "127.0.0.1", "8000"),
    )
