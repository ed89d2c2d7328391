"""Running a program: exit codes, help, one line for each error, pipes and streams."""

import os
import subprocess
import sys

import pytest
from absl import flags
from stack_marks import extended
from watched_processes import WATCHDOG

from tfwd.lm.config import SCHEMA
from tfwd.runs import command_runner
from tfwd.runs.errors import UserError

ABOUT = """
    Does a thing.

        tfwd-thing --workdir=FOLDER
"""


def define(values):
    flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    flags.mark_flag_as_required("workdir", values)
    flags.DEFINE_integer("tokens", 200, "how many", flag_values=values)
    flags.DEFINE_bool("fresh", False, "begin anew", flag_values=values)


def ends(capsys, main, *arguments):
    with pytest.raises(SystemExit) as caught:
        command_runner.run(main, define, ABOUT, argv=["program", *arguments])
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


def test_a_fault_of_the_code_keeps_its_traceback():
    def fault(values):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        command_runner.run(fault, define, ABOUT, argv=["program", "--workdir=a"])


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
        command_runner.run(lambda values: 1, define, ABOUT, schema=SCHEMA, argv=["program", flag])
    assert "model.weight_dropout=0.5" in capsys.readouterr().out


PROGRAM = """
import tfwd.runs.command_runner

def main(values):
    print("\\n".join(map(str, range(100000))))

tfwd.runs.command_runner.run(main, lambda values: None, "A program.")
"""


@pytest.mark.slow
def test_closed_pipe_is_no_error(tmp_path):
    """Checks `program | head`."""
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


@extended
def test_tensorflow_is_loaded_without_its_notes(root, tmp_path):
    """Checks a process of its own, without the other modules of `import tfwd`."""
    command = [sys.executable, "-c", QUIET, str(root / "tfwd_programs.py")]
    environment = {"CUDA_VISIBLE_DEVICES": "-1", "HOME": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=WATCHDOG
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n", "")
    # The message of a failed import is not lost.
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
with programs._captured_stderr():
    print(file.fileno() > 2, sys.stdin.read() == "", file=sys.stderr)
"""


def test_streams_that_are_closed_and_a_machine_without_temporary_files(root):
    """Checks closed streams without TensorFlow, which the module does not import."""
    command = [sys.executable, "-c", CLOSED, str(root / "tfwd_programs.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "True True\n")
