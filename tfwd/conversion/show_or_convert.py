"""tfwd-pretrained: shows how a published model would be loaded, or converts it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from typing import TYPE_CHECKING, Any

from absl import flags

from tfwd.atomic_files import readable_mode
from tfwd.runs import command_runner
from tfwd.runs.errors import UserError

if TYPE_CHECKING:
    import keras

    from tfwd.pretrained import Plan

ABOUT = """
Shows or converts the weights of a published model (a folder with config.json and weights).

    tfwd-pretrained plan --source=FOLDER
    tfwd-pretrained plan --source=FOLDER --model=stack --layers=8-11 --json
    tfwd-pretrained convert --source=FOLDER --out=model.keras
    tfwd-pretrained convert --source=FOLDER --model=stack --layers=0,2 --out=s.safetensors

"plan" reads only names and shapes. It prints the tensor for each variable, and all problems. Its
exit code is 1 if there are problems. "convert" writes a Keras model or a safetensors file. The keys
of the safetensors file are the paths of the variables, so tfwd.pretrained.load needs no mapping.
"""

COMMANDS = ("plan", "convert")
PARTS = ("all", "embeddings", "stack", "pooler", "encoder", "decoder")


def run() -> None:
    """Runs the console script."""
    argv = sys.argv
    command = argv[1] if len(argv) > 1 and not argv[1].startswith("-") else ""
    if command in COMMANDS:
        argv = [f"{argv[0]} {command}", *argv[2:]]
    command_runner.run(
        lambda values: main(command, values), define, ABOUT, argv=_without(command, argv)
    )


def _without(command: str, argv: list[str]) -> list[str]:
    return argv if command in COMMANDS else [a for a in argv if a != command]


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    flags.DEFINE_string("source", None, "folder of the published model", flag_values=values)
    flags.mark_flag_as_required("source", values)
    flags.DEFINE_string(
        "model", "all", f"part of the model: {', '.join(PARTS)}", flag_values=values
    )
    flags.DEFINE_string(
        "layers", "", "layers to use, such as 8-11 or 0,2,4; by default all", flag_values=values
    )
    flags.DEFINE_bool("pooler", False, "include the pooler, if there is one", flag_values=values)
    flags.DEFINE_string(
        "prefix", None, "prefix of all keys; detected by default", flag_values=values
    )
    flags.DEFINE_multi_string(
        "ignore", [], "regular expression for keys to ignore", flag_values=values
    )
    flags.DEFINE_multi_string(
        "allow_missing",
        [],
        "regular expression for variables that the file may lack",
        flag_values=values,
    )
    flags.DEFINE_string("out", "", "file to write: .keras or .safetensors", flag_values=values)
    flags.DEFINE_bool("overwrite", False, "replace an existing file at --out", flag_values=values)
    flags.DEFINE_bool("json", False, "print the plan as one line of JSON", flag_values=values)


def main(command: str, values: flags.FlagValues) -> int:
    """Runs the command "plan" or "convert", and returns the exit code."""
    if command not in COMMANDS:
        problem = f"{command!r} is not a command" if command else "the command is missing"
        raise UserError(
            f"{problem}: give {' or '.join(COMMANDS)}, such as tfwd-pretrained plan --source=FOLDER"
        )
    if command == "convert":
        _check_out(values)
    from tfwd.pretrained import SourceError
    from tfwd.pretrained.loading_plan import table

    try:
        plan = make_plan(values)
        if command == "plan":
            # Cut off the table's lines only on a terminal.
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            print(json.dumps(plan.as_dict()) if values.json else table(plan, width))
            for problem in plan.problems():
                print(f"error: {problem}", file=sys.stderr)
            return int(bool(plan.problems()))
        convert(values, plan)
    except SourceError as error:
        raise UserError(str(error)) from error
    return 0


def _check_out(values: flags.FlagValues) -> None:
    """Raises a `UserError` if the output file cannot be written."""
    out = values.out
    if not out.endswith((".keras", ".safetensors")):
        what = f"--out={out}" if out else "--out is missing"
        raise UserError(f"{what}: give a file that ends in .keras or .safetensors")
    folder = os.path.dirname(out) or "."
    if not os.path.isdir(folder):
        raise UserError(f"--out={out}: there is no folder {folder}; create it or give another path")
    if os.path.exists(out) and not values.overwrite:
        raise UserError(f"--out={out} exists already: give another name, or add --overwrite")


def make_plan(values: flags.FlagValues) -> Plan:
    """Makes the plan for the chosen part."""
    from tfwd.layers.transformer.formats.published_layer import plan_weights

    return plan_weights(
        _layer(values),
        values.source,
        prefix=values.prefix,
        ignore=values.ignore,
        allow_missing=values.allow_missing,
    )


def _layer(values: flags.FlagValues) -> keras.layers.Layer:
    """Makes the layer of the chosen part."""
    from tfwd.layers import transformer as T
    from tfwd.layers.transformer.formats.published_configs import read_config

    if values.model not in PARTS:
        raise UserError(f"--model={values.model} is not a part: give {' or '.join(PARTS)}")
    options: dict[str, Any] = {}
    try:
        read = read_config(values.source)
        is_t5 = read.model_type == "t5"
        kinds: dict[str, Any] = {"all": T.Bert, "embeddings": T.Embeddings}
        kinds |= {"stack": T.TransformerStack, "pooler": T.Pooler}
        if is_t5:
            kinds = {"all": T.T5, "encoder": T.T5Stack, "decoder": T.T5Stack}
        if values.model not in kinds:
            raise UserError(
                f"--model={values.model}: a {read.model_type} model has only the parts "
                f"{', '.join(kinds)}; give one of these"
            )
        if values.model == "decoder":
            options["is_decoder"] = True
        if values.model == "all" and not is_t5:
            options["add_pooler"] = values.pooler
        kind = kinds[values.model]
        return kind.from_config(values.source, numbers_of(values.layers), **options)
    except ValueError as error:
        raise UserError(str(error)) from error


def numbers_of(text: str) -> list[int] | None:
    """Returns the layer numbers in a text such as "8-11" or "0,2,4"; `None` for all.

    Raises:
        UserError: the text has another form.
    """
    if not text:
        return None
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not found:
            raise UserError(f"--layers={text}: give numbers of layers, such as 8-11 or 0,2,4")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise UserError(f"--layers={text}: {first}-{last} runs backwards; give {last}-{first}")
        numbers += range(first, last + 1)
    return numbers


def convert(values: flags.FlagValues, plan: Plan) -> None:
    """Loads the weights, and writes the output file. A failure leaves no incomplete file."""
    if problems := plan.problems():
        raise UserError(f"{plan.source}: nothing was written: {'; '.join(problems)}")
    plan.apply()
    layer = plan.model
    part = f"{values.out}.part{os.path.splitext(values.out)[1]}"
    try:
        if values.out.endswith(".keras"):
            _model_of(layer).save(part)
        else:
            _write(layer, part)
        os.chmod(part, readable_mode())  # safetensors creates files that only the owner can read
        os.replace(part, values.out)
    finally:
        if os.path.exists(part):
            os.remove(part)
    print(f"{values.out}: {len(plan.steps)} variables, {os.path.getsize(values.out):,} bytes")


def _model_of(layer: Any) -> keras.Model:
    """Returns a functional model of the layer alone."""
    import keras

    shape = layer.any_input_shape()[1:]
    dtype = "int32" if len(shape) == 1 else layer.compute_dtype
    count = 2 if hasattr(layer, "decoder") else 1
    inputs = [keras.Input(shape, dtype=dtype) for _ in range(count)]
    return keras.Model(inputs if count > 1 else inputs[0], layer(*inputs))


def _write(layer: Any, path: str) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    from tfwd import _keras
    from tfwd.pretrained.target_variables import targets_of

    # safetensors would write wrong numbers for an array in Fortran order.
    arrays = {
        target.path: np.ascontiguousarray(_keras.variables.tf_variable(target.variable).numpy())
        for target in targets_of(layer)
    }
    save_file(arrays, path, metadata={"format": "np"})
