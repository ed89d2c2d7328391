"""Weights in a file that both versions of Keras read."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2, once

from tfwd.lm.model import LanguageModel, make_model, named_weights
from tfwd.lm.program import PROGRAM, load
from tfwd.runs.errors import UserError
from tfwd.runs.storage import weight_files
from tfwd.runs.storage.run_folder import RunFolder

OPTIONS = {
    "tied": {},
    "untied": {"tie_weights": False},
    "perturbed": {
        "weight_dropout": 0.5,
        "variational_noise": 0.1,
        "embedding_dropout": 0.1,
        "input_dropout": 0.1,
        "hidden_dropout": 0.1,
        "output_dropout": 0.1,
    },
    "dropped": {"weight_dropout": 0.5},
    "half": {"dtype_policy": "bfloat16"},
}
IDS = tf.constant([[1, 2, 3], [4, 0, 6]], tf.int32)
# Written by weights/write.py on each Keras, with the logits of the models there.
WRITTEN = Path(__file__).parent / "weights"


def save(path, model):
    weight_files.save(path, named_weights(model), "language model")


def read(path, model):
    weight_files.load(path, named_weights(model), "language model")


def make(case, seed):
    options = {"embedding_dim": 4, "hidden_units": (5, 4), **OPTIONS[case]}
    return LanguageModel(7, seed=seed, **options)


@pytest.mark.bfloat16
@pytest.mark.parametrize("case", OPTIONS)
def test_written_weights_are_read(case, tmp_path):
    model, other = make(case, 1), make(case, 2)
    for variable in model.trainable_variables:  # the biases too
        noise = tf.random.stateless_normal(variable.shape, [1, 2])
        variable.assign(tf.cast(noise, variable.dtype))
    save(tmp_path / "weights.npz", model)
    read(tmp_path / "weights.npz", other)
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(model(IDS).logits, other(IDS).logits)


def test_names_are_of_the_models_order():
    names = [
        "embedding/embeddings",
        "lstm_1/kernel",
        "lstm_1/recurrent_kernel",
        "lstm_1/bias",
        "lstm_2/kernel",
        "lstm_2/recurrent_kernel",
        "lstm_2/bias",
    ]
    untied = [*names, "decoder/kernel", "decoder/bias"]
    assert list(named_weights(make("untied", 0))) == untied
    for case in ("tied", "perturbed", "dropped"):  # draws neither add nor change a name
        assert list(named_weights(make(case, 0))) == [*names, "decoder/bias"]


def test_a_file_that_is_cut_short_or_changed(tmp_path):
    path, model = tmp_path / "weights.npz", make("tied", 1)
    save(path, model)
    whole, before = path.read_bytes(), model.get_weights()
    damaged = [whole[:length] for length in (0, 3, 100, len(whole) // 2, len(whole) - 1)]
    for where in (200, len(whole) // 2):
        damaged.append(whole[:where] + bytes(8) + b"\xff" + whole[where + 9 :])
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(UserError, match="weights.npz is not a (complete )?file of .*weights"):
            read(path, model)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_another_file(tmp_path):
    path, model = tmp_path / "weights.npz", make("tied", 1)
    with pytest.raises(UserError, match="cannot read .*weights.npz: No such file"):
        read(path, model)
    os.mkfifo(path)  # the program would wait for it
    with pytest.raises(UserError, match="cannot read .*weights.npz: it is a pipe or a device"):
        read(path, model)
    path.unlink()
    path.write_text("some text")
    with pytest.raises(UserError, match="is not a complete file of a language model's weights"):
        read(path, model)
    with open(path, "wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(UserError, match="is not a complete file of a language model's weights"):
        read(path, model)
    np.savez(path, kernel=np.zeros(3))
    with pytest.raises(UserError, match="is not a file of a language model's weights"):
        read(path, model)
    header = {"format": "tfwd language model weights", "version": weight_files.VERSION + 1}
    np.savez(path, header=np.frombuffer(json.dumps(header).encode(), np.uint8))
    with pytest.raises(UserError, match="is of version 2 of the format, and this tfwd reads"):
        read(path, model)


def test_another_model(tmp_path):
    path = tmp_path / "weights.npz"
    save(path, make("tied", 1))
    with pytest.raises(
        UserError, match=r"of another model: lstm_1/kernel is \(4, 20\) in the file and \(4, 12\)"
    ):
        read(path, LanguageModel(7, 4, (3, 4)))
    with pytest.raises(UserError, match="decoder/kernel is missing in the file and"):
        read(path, LanguageModel(7, 4, (5, 4), tie_weights=False))
    save(path, LanguageModel(7, 4, (4,)))
    with pytest.raises(UserError, match="lstm_2/kernel is missing in the file and"):
        read(path, LanguageModel(7, 4, (4, 4)))


@pytest.mark.parametrize("written_on", ["keras2", "keras3"])
@pytest.mark.parametrize("case", ["tied", "untied", "perturbed"])
def test_a_file_of_either_keras_gives_the_same_logits(written_on, case):
    found = make(case, 5)
    read(WRITTEN / f"{written_on}-{case}.npz", found)
    logits = np.load(WRITTEN / f"{written_on}-{case}-logits.npy")
    np.testing.assert_allclose(found(IDS).logits, logits, atol=1e-5)
    assert np.ptp(logits) > 1  # the model is not untrained


def test_a_run_of_the_other_keras_is_read_but_not_resumed(make_run):
    run = make_run()
    other = 3 if IS_KERAS_2 else 2
    expected = load(run).model(IDS).logits
    config = (run / "config.json").read_text()
    (run / "config.json").write_text(config.replace('"sgd"', '"optimizer of the other"'))
    for kind in ("best", "checkpoints"):
        for step in (run / kind).iterdir():  # as if it had been saved there
            pretend(step, other)
    np.testing.assert_array_equal(load(run).model(IDS).logits, expected)
    with pytest.raises(UserError, match=f"was saved on Keras {other}.*only the best weights"):
        load(run, "last")
    model = make_model(load(run).config, len(load(run).vocabulary))
    with pytest.raises(UserError, match=f"was saved on Keras {other}"):
        RunFolder(run, PROGRAM).restore({"model": model}, "", say=print)


def pretend(step, other):
    path = step / "written_by.json"
    path.write_text(json.dumps({"keras": other}))
    manifest = json.loads((step / "manifest.json").read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    (step / "manifest.json").write_text(json.dumps(manifest))


def test_best_weights_of_before_there_was_such_a_file(make_run):
    run = make_run()
    expected = load(run).model(IDS).logits
    for step in (run / "best").iterdir():
        manifest = json.loads((step / "manifest.json").read_text())
        for name in ("weights.npz", "written_by.json"):
            del manifest[name]
            (step / name).unlink()
        (step / "manifest.json").write_text(json.dumps(manifest))
    np.testing.assert_array_equal(load(run).model(IDS).logits, expected)


@pytest.mark.slow
@once
@pytest.mark.parametrize("program", ["evaluate", "generate"])
def test_programs_of_the_other_stack(make_run, root, program):
    """Checks that a run's folder is evaluated alike on both stacks, if both are installed."""
    python = root / (".venv" if IS_KERAS_2 else ".venv-addons") / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is not set up")
    run = make_run()
    code = f"from tfwd.lm.commands.{program} import run; run()"
    arguments = ["--json"] if program == "evaluate" else ["--tokens=30", "--temperature=0"]
    here, there = (
        subprocess.run(
            [executable, "-c", code, f"--workdir={run}", *arguments],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        ).stdout
        for executable in (sys.executable, python)
    )
    if program == "generate":
        assert here == there and len(here) > 30
        return
    here, there = json.loads(here), json.loads(there)
    for name, value in here.items():
        number = isinstance(value, float)
        assert there[name] == (pytest.approx(value, rel=1e-5) if number else value), name
