"""The macros of this repository's BUILD files."""

# What setup.py installs inside tfwd.
_MOVED = ("layers/", "optimizers/")

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
    doc = "The sources under lib/, by their installed names: layers/x.py is lib/tfwd/layers/x.py.",
)

def concept(name, srcs, deps = [], visibility = None):
    """A library of sources under their installed names.

    Args:
        name: the target's.
        srcs: the sources, as they stand in the repository.
        deps: the libraries that they import.
        visibility: who may depend on it; without it, this package alone.
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
    """A binary that does what the console script of the same name does.

    Args:
        name: the target's, and the script's.
        function: the function of tfwd_programs that it calls.
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
            "//:finetune",
            "//:lm",
        ],
    )

def tests(name, files, deps = ["//:tfwd"], data = [], more = {}, fast = [], manual = {}):
    """A test target for each file, and a suite of them all.

    Args:
        name: the suite's.
        files: the test files; that of a/test_b.py is the target a/test_b.
        deps: the libraries under test.
        data: the files of the repository that the tests read.
        more: the data of single tests, by their targets' names.
        fast: the tests that a first check runs, all of a few seconds.
        manual: the tests that do not work here, with the reason.
    """
    names = [file[:-len(".py")] for file in files]
    for test in names:
        native.py_test(
            name = test,
            # A process with TensorFlow takes some 800 MB, which is what Bazel counts for this size.
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
