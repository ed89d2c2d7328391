"""The command line: values, one line for each error, help, and exit codes."""

import os
import subprocess
import sys

import pytest
from absl import flags
from processes import WATCHDOG

from tfwd.lm.config import SCHEMA
from tfwd.runs import app
from tfwd.runs.command_line import parse
from tfwd.runs.errors import UserError

ABOUT = """
    Does a thing.

        tfwd-thing --workdir=FOLDER
"""
CONFIG = """
from tfwd.lm.config import default_config

def get_config(name="plain"):
    config = default_config()
    config.data.window = {"plain": 20, "long": 90}[name]
    return config
"""


def define(values):
    flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    flags.mark_flag_as_required("workdir", values)
    flags.DEFINE_integer("tokens", 200, "how many", flag_values=values)
    flags.DEFINE_bool("fresh", False, "begin anew", flag_values=values)


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    return str(path)


def read(*arguments, config=False):
    return parse(["program", *arguments], define, schema=SCHEMA if config else None)


def test_plain_flags():
    values = read("--workdir=here", "--tokens", "3", "--fresh")
    assert (values.workdir, values.tokens, values.fresh) == ("here", 3, True)
    assert read("--workdir=here").tokens == 200  # nothing of the last time is left


def test_config_and_overrides(config_file):
    values = read(
        "--workdir=here",
        f"--config={config_file}:long",
        "--config.model.hidden_units=300,200,128",
        "--config.model.weight_dropout=0",
        "--noconfig.model.recompute",
        "--config.optimizer.kwargs.momentum=0.9",
        "--config.data.path",
        "a folder",
        config=True,
    )
    config = values.config
    assert config.data.window == 90
    assert config.model.hidden_units == (300, 200, 128)
    assert config.model.weight_dropout == 0.0 and isinstance(config.model.weight_dropout, float)
    assert config.model.recompute is False
    assert config.optimizer.kwargs.momentum == 0.9
    assert config.data.path == "a folder"
    with pytest.raises(AttributeError):
        config.model.more = 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.model.weigth_dropout=0.5"], "did you mean model.weight_dropout"),
        (["--config.model.weigth_dropout", "0.5"], "did you mean model.weight_dropout"),
        (["--noconfig.model.recompote"], "did you mean model.recompute"),
        (["--config.model={}"], "model is a group of config keys"),
        (["--config.data.window=1.5"], "--config.data.window=1.5: give a whole number, at least 1"),
        (["--config.model.weight_dropout=x"], "weight_dropout=x: give a rate"),
        (["--config.model.tie_weights=maybe"], "tie_weights=maybe: give true or false"),
        (["--config.model.hidden_units=3 4"], "hidden_units=3 4: give whole numbers"),
        (["--config.model.hidden_units=a,b"], "model.hidden_units"),
        (["--config.model.weight_dropout=1.0"], "model.weight_dropout=1.0: give a rate"),
        (["--config.optimizer.kwargs.momentun=1"], "did you mean momentum"),
        (["--wrokdir=b"], "there is no flag --wrokdir; see --help (near: --workdir)"),
        (["--tokens=x"], "--tokens=x: give a whole number"),
        (["stray"], "'stray' is not a flag"),
        (["--tokens"], "tokens"),
    ],
)
def test_errors(config_file, arguments, words):
    with pytest.raises(UserError) as caught:
        read("--workdir=here", f"--config={config_file}", *arguments, config=True)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_flags(config_file):
    with pytest.raises(UserError, match="--workdir is missing; see --help"):
        read()
    for arguments in ((), ("--config.data.window=3",), ("--config",)):
        with pytest.raises(UserError, match="--config is missing; give a file"):
            read("--workdir=here", *arguments, config=True)


def test_config_file_is_missing(config_file, tmp_path):
    with pytest.raises(UserError, match=r"there is no such file; .* has small\.py"):
        read("--workdir=here", f"--config={tmp_path}/smal.py", config=True)
    with pytest.raises(UserError, match=r"=nowhere/smal\.py: there is no such file$"):
        read("--workdir=here", "--config=nowhere/smal.py", config=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("def get_config(:", "invalid syntax in line 1"),
        ("x = 1", "get_config"),
        ("import nothing_like_it", "line 1: No module named 'nothing_like_it'"),
        (
            "from tfwd.lm.config import default_config\n"
            "def get_config():\n"
            "    config = default_config()\n"
            "    config.model.weigth_dropout = 0.5\n",
            "line 4: there is no config key weigth_dropout; did you mean model.weight_dropout",
        ),
        (
            "from tfwd.lm.config import default_config\n"
            "def get_config():\n"
            "    config = default_config()\n"
            "    config.data.window = 'long'\n",
            "line 4: Could not override field 'window'",
        ),
    ],
)
def test_broken_config_file(tmp_path, content, words):
    path = tmp_path / "broken.py"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        read("--workdir=here", f"--config={path}", config=True)
    assert words in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def ends(capsys, main, *arguments):
    with pytest.raises(SystemExit) as caught:
        app.run(main, define, ABOUT, argv=["program", *arguments])
    return caught.value.code, *capsys.readouterr()


def test_exit_codes(capsys):
    assert ends(capsys, lambda values: None, "--workdir=a") == (0, "", "")
    assert ends(capsys, lambda values: 3, "--workdir=a") == (3, "", "")

    def wrong(values):
        raise UserError("the text\n is  empty")

    assert ends(capsys, wrong, "--workdir=a") == (1, "", "error: the text is empty\n")

    def stop(values):
        raise KeyboardInterrupt

    assert ends(capsys, stop, "--workdir=a") == (130, "", "stopped\n")
    assert ends(capsys, stop)[0] == 1


def test_what_the_system_refuses_is_one_line(capsys):
    def full(values):
        with open("/dev/full", "w") as file:
            file.write("more than fits")

    def lost(values):
        os.listdir("no/such/file")

    def large(values):
        bytearray(1 << 60)

    said = {
        full: "cannot write the output: No space left on device",
        large: "not enough memory",
        lost: "no/such/file: No such file",
    }
    for main, words in said.items():
        code, out, err = ends(capsys, main, "--workdir=a")
        assert ((code, out) == (1, "") and err.startswith(f"error: {words}")) or words in err
        assert err.startswith("error: ") and len(err.splitlines()) == 1


def test_an_argument_that_is_not_utf8(capsys):
    for argument in ("--workdir=\udcff", "\udcff", "--\udcff=3"):
        code, _, err = ends(capsys, lambda values: None, "--workdir=a", argument)
        assert code == 1 and err.startswith("error: ") and "is not UTF-8" in err


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("del config['optimizer']", "has no optimizer.name; begin with default_config"),
        ("del config['optimizer']; config.optimizer = 3", "has no optimizer.name"),
        ("config.optimizer.kwargs.momentum = object()", "optimizer.kwargs.momentum=<object"),
        ("config.optimizer.kwargs.momentum = [float('nan')]", "optimizer.kwargs.momentum=[nan]"),
        ("config.model.me = config", "there is no config key model.me"),
        ("raise SystemExit(0)", "line 5: it ends the program"),
        ("config.sample.prompt = '\\udcff'", "give a text of UTF-8"),
        ("config.seed = 2 ** 32", "give a whole number, at least 0 and at most 4294967295"),
        ("config.training.patience = 10 ** 5000", "and at most 2147483647"),
    ],
)
def test_config_that_is_none(tmp_path, lines, words):
    path = tmp_path / "broken.py"
    head = "from tfwd.lm.config import default_config\ndef get_config():\n"
    body = f"    config = default_config()\n    config.unlock()\n    {lines}\n    return config\n"
    path.write_text(head + body)
    with pytest.raises(UserError) as caught:
        read("--workdir=here", f"--config={path}", config=True)
    assert words in str(caught.value)


@pytest.mark.parametrize("argument", ["beta_1=abc", "amsgrad=3", "beta_1=[]", "clipnorm=x"])
def test_arguments_of_the_optimizer_have_their_type(config_file, argument):
    arguments = ["--config.optimizer.name=adam", f"--config.optimizer.kwargs.{argument}"]
    with pytest.raises(UserError, match=rf"^optimizer.kwargs.{argument[:4]}.*: adam takes "):
        read("--workdir=here", f"--config={config_file}", *arguments, config=True)


def test_a_fault_of_the_code_keeps_its_traceback():
    def fault(values):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        app.run(fault, define, ABOUT, argv=["program", "--workdir=a"])


@pytest.mark.parametrize("flag", ["--help", "-h", "--helpfull"])
def test_help(capsys, flag):
    code, out, _ = ends(capsys, lambda values: 1, flag)
    assert code == 0
    assert out.startswith("Does a thing.\n\n    tfwd-thing --workdir=FOLDER\n")
    assert "  --workdir=STRING\n      folder of the run\n" in out
    assert "  --tokens=INT\n      how many (default: '200')\n" in out
    assert "--fresh\n" in out
    assert "--config" not in out
    assert "verbosity" not in out and len(out.splitlines()) < 20  # none of the libraries' flags
    with pytest.raises(SystemExit):
        app.run(lambda values: 1, define, ABOUT, schema=SCHEMA, argv=["program", flag])
    assert "model.weight_dropout=0.5" in capsys.readouterr().out


PROGRAM = """
import tfwd.runs.app

def main(values):
    print("\\n".join(map(str, range(100000))))

tfwd.runs.app.run(main, lambda values: None, "A program.")
"""


def test_closed_pipe_is_no_error(tmp_path):
    """As in `program | head`."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    command = [sys.executable, str(file)]
    with (
        open(tmp_path / "errors", "w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.wait(timeout=WATCHDOG) == 0
    assert "Error" not in (tmp_path / "errors").read_text()


QUIET = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("quiet", sys.argv[1])
quiet = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quiet)
if len(sys.argv) > 2:
    sys.path.insert(0, sys.argv[2])
quiet.quiet_tensorflow()
import keras, tensorflow as tf
print(float(tf.constant(1.0) + 1.0))
"""


def test_tensorflow_is_loaded_without_its_notes(root, tmp_path):
    """In a process of its own, and without what else `import tfwd` loads."""
    command = [sys.executable, "-c", QUIET, str(root / "tfwd_programs.py")]
    environment = {"CUDA_VISIBLE_DEVICES": "-1", "HOME": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=WATCHDOG
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n", "")
    # What a failure to load has to say is not lost.
    (tmp_path / "tensorflow.py").write_text("import os\nos.write(2, b'why\\n')\n1 / 0\n")
    command.append(str(tmp_path))
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=WATCHDOG
    )
    assert done.returncode == 1
    assert done.stderr.startswith("why\n") and "ZeroDivisionError" in done.stderr


CLOSED = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("programs", sys.argv[1])
programs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(programs)
for number in (0, 1):
    os.close(number)
programs.open_closed_streams()
file = open(sys.argv[1])
print("into nothing")
sys.stdout.flush()
os.environ["TMPDIR"] = "/dev/null"
programs.tempfile.tempdir = "/dev/null/none"
with programs._stderr_aside():
    print(file.fileno() > 2, sys.stdin.read() == "", file=sys.stderr)
"""


def test_streams_that_are_closed_and_a_machine_without_temporary_files(root):
    """Without TensorFlow, which the module does not load by itself."""
    command = [sys.executable, "-c", CLOSED, str(root / "tfwd_programs.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "True True\n")
