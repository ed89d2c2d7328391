"""Macros of this repository's BUILD files."""

# Folders that setup.py installs inside tfwd.
_MOVED = ("layers/", "optimizers/", "configs/")

def _installed_impl(ctx):
    links = []
    for source in ctx.files.srcs:
        name = source.owner.name
        name = ("tfwd/" if name.startswith(_MOVED) else "") + name
        link = ctx.actions.declare_file("lib/" + name)
        ctx.actions.symlink(output = link, target_file = source)
        links.append(link)
    return [DefaultInfo(files = depset(links))]

_installed = rule(
    implementation = _installed_impl,
    attrs = {"srcs": attr.label_list(allow_files = True)},
    doc = "Links the sources under lib/ by their installed names: layers/x.py is lib/tfwd/layers/x.py.",
)

def concept(name, srcs, deps = [], visibility = None):
    """Declares a library of sources under their installed names.

    Args:
        name: the name of the target.
        srcs: the sources, by their paths in the repository.
        deps: the libraries that they import.
        visibility: the packages that may depend on it. By default only this package.
    """
    _installed(name = name + "_installed", srcs = srcs, visibility = ["//visibility:private"])
    native.py_library(
        name = name,
        srcs = [name + "_installed"],
        imports = ["lib"],
        visibility = visibility,
        deps = deps,
    )

_PROGRAM = """\
import os

import tfwd_programs

os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))  # where `bazel run` was called
tfwd_programs.{function}()
"""

def _main_impl(ctx):
    ctx.actions.write(ctx.outputs.out, _PROGRAM.format(function = ctx.attr.function))

_main = rule(
    implementation = _main_impl,
    attrs = {
        "function": attr.string(mandatory = True),
        "out": attr.output(mandatory = True),
    },
)

def program(name, function):
    """Declares a binary that runs the console script of the same name.

    Args:
        name: the name of the target and of the script.
        function: the function of tfwd_programs to call.
    """
    _main(
        name = name + "_main",
        out = name + ".py",
        function = function,
        visibility = ["//visibility:private"],
    )
    native.py_binary(
        name = name,
        srcs = [name + ".py"],
        visibility = ["//visibility:public"],
        deps = [
            "//:conversion",
            "//:named_configs",
        ],
    )

def tests(name, files, deps = ["//:tfwd"], data = [], more = {}, fast = [], manual = {}):
    """Declares a test target for each file, and a suite of all.

    Args:
        name: the name of the suite.
        files: the test files. The target of a/test_b.py is a/test_b.
        deps: the libraries under test.
        data: files of the repository that all tests read.
        more: data of single tests, by target name.
        fast: tests of a few seconds, for a first check.
        manual: tests that do not work in Bazel, with the reason.
    """
    names = [file[:-len(".py")] for file in files]
    for test in names:
        native.py_test(
            name = test,
            # A process with TensorFlow needs about 800 MB, which Bazel reserves for this size.
            size = "enormous",
            timeout = "moderate" if test in fast else "long",
            srcs = [test + ".py", "//bazel:pytest_runner.py"],
            args = [native.package_name() + "/" + test + ".py"],
            data = [":shared", "@tfwd_environment//:packages.txt"] + data + more.get(test, []),
            main = "//bazel:pytest_runner.py",
            tags = (["fast"] if test in fast else []) + (["manual"] if test in manual else []),
            deps = deps,
        )
    native.test_suite(name = name, tests = [test for test in names if test not in manual])
    missing = [test for test in fast + list(more) + list(manual) if test not in names]
    if missing:
        fail("%s has no tests %s" % (name, missing))
