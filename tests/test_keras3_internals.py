"""Private names of Keras 3 that tfwd uses: each exists, and the table names its files.

A new release of Keras may move any of them. The tests find the uses in the sources. A use without a
row in a table fails, and a row without a use fails too.
"""

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2

import tfwd

pytestmark = pytest.mark.skipif(IS_KERAS_2, reason="of Keras 2 there will be no other release")

VERSION = tuple(map(int, keras.__version__.split(".")[:2]))

# By the objects that have the attributes.
ATTRIBUTES = {
    "layer": [
        "_allow_non_tensor_positional_args",
        "_call_has_mask_arg",
        "_call_has_training_arg",
        "_call_signature",
        "_called",
        "_convert_input_args",
        "_flatten_layers",
        "_get_own_losses",
        "_inbound_nodes",
        "_kernel",
        "_layers",
        "_loss_ids",
        "_losses",
        "_metrics",
        "_non_trainable_variables",
        "_saved_model_arg_spec",
        "_saved_model_inputs_spec",
        "_seed_generators",
        "_set_mask_metadata",
        "_tracked",
        "_trainable_variables",
    ],
    "convolution": ["_compute_causal_padding"],
    "embedding": ["_embeddings"],
    "policy": ["_source_name"],
    "symbol": ["_keras_history"],
    "functional": ["_inputs_struct"],
    "model": [
        "_compile_loss",
        "_compile_metrics",
        "_distribute_strategy",
        "_functional",
        "_initial_epoch",
        "_make_function",
        "_maybe_symbolic_build",
        "_symbolic_build",
    ],
    "backup": ["_load_model", "_save_model", "_training_metadata_path", "_weights_path"],
    "checkpoint": ["_get_file_path"],
    "loss": ["_user_loss", "_user_loss_weights"],
    "optimizer": [
        "_accumulated_gradients",
        "_apply_weight_decay",
        "_backend_apply_gradients",
        "_backend_update_step",
        "_clip_gradients",
        "_iterations",
        "_learning_rate",
        "_model_variables_moving_average",
        "_delete_tracking",
        "_handle_deferred_dependencies",
        "_track_trackable",
        "_tracker",
        "_trainable_variables_indices",
        "_var_key",
        "_variables",
    ],
    "recurrent": ["_maybe_config_dropout_masks", "_maybe_reset_dropout_masks"],
    "variable": ["_direct_assign", "_dtype", "_maybe_autocast", "_value"],
}
# Names that the oldest supported release lacks. tfwd checks for them, so without an error
# here nobody would notice that a name disappeared.
LATER = {
    "layer": ["_call_context_args", "_call_has_context_arg", "_remat_mode"],
    "bidirectional": ["_can_attempt_fused_gru", "_can_attempt_fused_lstm"],
    "several": ["_optimizer_map", "_var_to_optimizer_idx"],
}
# Public by name, but on no page of Keras's documentation. A use that is not listed is not found.
UNDOCUMENTED = {
    "layer": ["call_signature_parameters", "supports_jit"],
    "recurrent": ["inner_loop", "use_cudnn"],
    "cell": ["get_dropout_mask", "get_recurrent_dropout_mask"],
    "optimizer": ["update_step", "loss_scale_factor", "finalize_variable_values"],
    "variable": ["overwrite_with_gradient"],
}
MODULES = {
    "keras.src.backend.AutocastScope",
    "keras.src.backend.common.global_state",
    "keras.src.backend.common.symbolic_scope.in_symbolic_scope",
    "keras.src.backend.compute_output_spec",
    "keras.src.backend.get_autocast_scope",
    "keras.src.backend.get_keras_mask",
    "keras.src.backend.in_stateless_scope",
    "keras.src.backend.set_keras_mask",
    "keras.src.backend.tensorflow.trainer",
    "keras.src.layers.layer.CallContext",
    "keras.src.losses.loss.squeeze_or_expand_to_same_rank",
    "keras.src.losses.losses.LossFunctionWrapper",
    "keras.src.models.Functional",
    "keras.src.trainers.compile_utils.CompileLoss",
    "keras.src.utils.naming.to_snake_case",
    "keras.src.utils.python_utils.is_default",
    "keras.src.utils.tracking",
}
# Private names that are tfwd's own (attributes that it makes, beginnings of names) or Python's.
OWN = {"_", "_abc_impl", "_obj_ref", "_optimizer_", "_self_", "_tfwd_intercepted_"}


# Names that Keras's objects and tfwd use for different things, and names that
# `layers/_substitution/keras_own_layers.py` ignores when it compares layers. Otherwise each layer
# would be analysed separately.
CHANCE = {
    "_autocast",
    "_constraint",
    "_initializer",
    "_inputs",
    "_lock",
    "_model",
    "_name",
    "_parent_path",
    "_path",
}
ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def uses() -> dict[str, set[str]]:
    """Returns the files of each private name, and of each path into `keras.src`."""
    package = Path(tfwd.__file__).parent
    files = [*package.glob("_keras3/*.py"), *package.glob("_keras_shared/*.py")]
    trees = {
        f"{file.parent.name}/{file.name}": ast.parse(file.read_text("utf-8")) for file in files
    }
    assert len(trees) > 12
    own = OWN.union(*map(defined, trees.values()))
    found: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for name in used(tree):
            if name not in own:
                found.setdefault(name, set()).add(file)
    return found


def defined(tree: ast.Module) -> Iterator[str]:
    """Yields the names that the sources define.

    These are functions, annotated attributes and attributes of `self`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            named = node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            named = node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            named = node.attr if getattr(node.value, "id", "") == "self" else ""
        else:
            continue
        if named not in KERASS:  # an attribute of Keras's that tfwd sets, or overrides
            yield named


def used(tree: ast.Module) -> Iterator[str]:
    """Yields private attributes, by name or in a string, and imports from `keras.src`."""
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if is_private(node.attr):
                yield node.attr
            if id(node) not in inner and (path := ast.unparse(node)).startswith("keras.src."):
                yield path
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if is_private(node.value) and node.value.isidentifier():
                yield node.value
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("keras.src"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


KERASS = {name for table in (ATTRIBUTES, LATER) for names in table.values() for name in names}


@functools.cache
def owners() -> dict[str, Any]:
    """Returns an object of each kind that the tables name."""
    dense = keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((2,)), dense])
    model.compile(keras.optimizers.Adam(use_ema=True, gradient_accumulation_steps=2), "mse")
    model.train_on_batch(tf.ones([1, 2]), tf.ones([1, 1]))
    lstm = keras.layers.LSTM(1)
    embedding = keras.layers.Embedding(2, 1)
    embedding.build()
    several = getattr(keras.optimizers, "MultiOptimizer", lambda function: None)
    several = several(lambda variable: keras.optimizers.SGD())
    if several is not None:
        several.build(model.trainable_variables)
    return {
        "backup": keras.callbacks.BackupAndRestore("backup"),
        "bidirectional": keras.layers.Bidirectional,
        "cell": lstm.cell,
        "checkpoint": keras.callbacks.ModelCheckpoint("model.keras"),
        "convolution": keras.layers.Conv1D(1, 1),
        "embedding": embedding,
        "functional": model._functional,
        "layer": dense,
        "loss": model._compile_loss,
        "model": model,
        "optimizer": model.optimizer,
        "policy": keras.dtype_policies.get("int8_from_float32"),
        "recurrent": lstm,
        "several": several,
        "symbol": keras.Input((2,)),
        "variable": dense.kernel,
    }


def rows() -> Iterator[Any]:
    for table in (ATTRIBUTES, UNDOCUMENTED, LATER):
        for owner, names in table.items():
            marks = [pytest.mark.skipif(VERSION < (3, 15), reason="later")] * (table is LATER)
            yield from (pytest.param(owner, name, id=name, marks=marks) for name in names)


@pytest.mark.parametrize(("owner", "name"), [*rows()])
def test_attribute_is_there(owner: str, name: str) -> None:
    where = ", ".join(sorted(uses().get(name, {"tfwd/_keras3"})))
    kind = type(owners()[owner]).__name__
    assert hasattr(owners()[owner], name), (
        f"{kind} has no {name} in Keras {VERSION}, used in {where}"
    )


@pytest.mark.parametrize("path", sorted(MODULES))
def test_names_from_inside_keras_exist(path: str) -> None:
    module, _, name = path.rpartition(".")
    where = ", ".join(sorted(uses().get(path, ())))
    assert hasattr(importlib.import_module(module), name), f"no {path}, used in {where}"


def test_the_tables_name_what_the_sources_use_and_no_more() -> None:
    listed = KERASS | MODULES
    missing = {name: sorted(files) for name, files in uses().items() if name not in listed}
    assert not missing, f"used, and in no table: {missing}"
    assert listed - set(uses()) == set(), "in a table, and no longer used"


def test_undocumented_names_are_still_used() -> None:
    files = (Path(tfwd.__file__).parent / "_keras3").glob("*.py")
    words = {word for file in files for word in re.findall(r"\w+", file.read_text("utf-8"))}
    listed = {name for names in UNDOCUMENTED.values() for name in names}
    assert listed - words == set(), "in the table, and no longer used"


def test_no_name_of_keras_is_taken_for_one_of_tfwds_own() -> None:
    """Checks that overriding methods and attributes in any file count as uses."""
    there = {name for owner in owners().values() for name in dir(owner) if is_private(name)}
    found: dict[str, set[str]] = {}
    for file in sorted(ROOT.glob("tfwd/**/*.py")) + sorted(ROOT.glob("[lo]*s/**/*.py")):
        if "_keras2" not in file.parts:
            tree = ast.parse(file.read_text("utf-8"))
            for name in there.intersection((*used(tree), *defined(tree))):
                found.setdefault(name, set()).add(str(file.relative_to(ROOT)))
    found = {name: files for name, files in found.items() if name not in KERASS | CHANCE}
    assert not found, f"names that Keras's objects have, in no table: {found}"


def test_only_the_code_for_keras_reads_private_names_of_other_objects() -> None:
    """Checks that features read a private name of Keras only through `tfwd._keras`."""
    found: dict[str, set[str]] = {}
    for file in sorted(ROOT.glob("tfwd/**/*.py")) + sorted(ROOT.glob("[lo]*s/**/*.py")):
        if file.parent.name in ("_keras2", "_keras3", "_keras_shared"):
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            own = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
            name = getattr(node, "attr", None) or getattr(node, "value", None)
            if not own and isinstance(name, str) and name in KERASS:
                found.setdefault(name, set()).add(str(file.relative_to(ROOT)))
    assert not found, f"private names of Keras outside tfwd/_keras3 and _keras_shared: {found}"


def test_no_name_stands_twice() -> None:
    listed = [name for t in (ATTRIBUTES, LATER) for names in t.values() for name in names]
    assert len(listed) == len(set(listed)) and not OWN & set(listed)
