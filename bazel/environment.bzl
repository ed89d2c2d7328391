"""Toolchain with the Python and the packages that `make` sets up in .venv."""

BUILD = """\
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

exports_files(["packages.txt"])

py_runtime(
    name = "python",
    interpreter_path = "{python}",
    python_version = "PY3",
    # The start script of every target. The sandbox has no python on its path.
    stub_shebang = "#!{python}",
)

py_runtime_pair(
    name = "pair",
    py3_runtime = ":python",
)

toolchain(
    name = "toolchain",
    toolchain = ":pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

LIST = """\
from importlib.metadata import distributions
print(*sorted({d.name + " " + d.version for d in distributions()}), sep="\\n")
"""

# Stand-ins for repositories that Bazel loads from the network, for --config=offline.
OFFLINE = """\
def offline_repositories():
    for name, path in {paths}.items():
        native.local_repository(name = name, path = path)
"""

def _environment_impl(ctx):
    checkout = ctx.path(Label("//:WORKSPACE")).dirname
    python = ctx.os.environ.get("TFWD_PYTHON") or str(checkout) + "/.venv/bin/python"
    if not ctx.path(python).exists:
        fail("there is no %s: run `make setup`, or set TFWD_PYTHON to a Python with tfwd's packages" % python)
    listed = ctx.execute([python, "-c", LIST])
    if listed.return_code:
        fail("%s does not run: %s" % (python, listed.stderr))

    # Every test depends on this file. A new version of a package therefore runs the tests again.
    ctx.file("packages.txt", listed.stdout)
    ctx.file("BUILD.bazel", BUILD.format(python = python))

    stubs = str(checkout) + "/bazel/offline/"
    paths = {}
    if ctx.os.environ.get("TFWD_OFFLINE"):
        paths = {
            "remote_coverage_tools": stubs + "remote_coverage_tools",
            "rules_cc": stubs + "rules_cc",
            "rules_java": stubs + "rules_java",
        }
    ctx.file("offline.bzl", OFFLINE.format(paths = paths))

environment = repository_rule(
    implementation = _environment_impl,
    doc = "Declares the interpreter, the versions of its packages, and the stand-ins for --config=offline.",
    environ = ["TFWD_PYTHON", "TFWD_SETUP", "TFWD_OFFLINE"],
    local = True,
)
