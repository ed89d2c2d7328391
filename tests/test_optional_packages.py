"""tfwd in a process that cannot import the packages of programs and plots."""

import subprocess
import sys
from pathlib import Path

import pytest
from stack_marks import extended

# Python marks a module that must not be found by None in sys.modules. Keras itself imports absl and
# rich, so these two are blocked while tfwd is imported.
BLOCKED = """
import sys
for name in ("matplotlib", "tensorboard", "ml_collections", "keras_tuner", "tokenizers"):
    sys.modules[name] = None
import keras, tensorflow
kept = {name: sys.modules.pop(name) for name in ("absl", "rich") if name in sys.modules}
for name in ("absl", "rich"):
    sys.modules[name] = None
import tfwd
for name in ("absl", "rich"):
    del sys.modules[name]
sys.modules.update(kept)
"""
TRAINING = """
import numpy as np
from tfwd import layers, parametrizations as P

model = keras.Sequential(
    [keras.Input((5, 4)), layers.WeightDropLSTM(3, weight_dropout=0.5), keras.layers.Dense(1)]
)
model = tfwd.parametrize(model, {"kernel": P.GaussianNoise(0.1)})
model.compile(tfwd.optimizers.DecoupledWeightDecay(keras.optimizers.Adam(), 0.01), "mse")
x, y = np.ones((8, 5, 4), "float32"), np.ones((8, 1), "float32")
checks = [tfwd.callbacks.FiniteCheck(), tfwd.callbacks.GradientSquaredMean(every_n_steps=1)]
model.fit(x, y, verbose=0, callbacks=checks)
tfwd.gradients.moments(model, x, y, keras.losses.MeanSquaredError())
tfwd.predict_samples(model, x, n=2)
print("trained")
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300
    )


@extended
def test_layers_train_without_the_packages_of_programs(tmp_path: Path) -> None:
    done = run(BLOCKED + TRAINING, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("trained\n")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("FiniteCheck(plot='a.png')", "FiniteCheck(plot=...) needs matplotlib"),
        ("FiniteCheck(log_dir='logs')", "FiniteCheck(log_dir=...) needs tensorboard"),
        ("GradientSquaredMean(plot='a.png')", "GradientSquaredMean(plot=...) needs matplotlib"),
        ("GradientSquaredMean(log_dir='logs')", "GradientSquaredMean(log_dir=...) needs tensorb"),
    ],
)
def test_a_plot_names_the_missing_package(
    call: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tfwd import callbacks

    for name in ("matplotlib", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError) as error:
        eval(f"callbacks.{call}", {"callbacks": callbacks})
    assert message in str(error.value) and "pip install" in str(error.value)


PROGRAM = """
import sys
sys.modules["rich"] = sys.modules["tensorboard"] = None
sys.argv = ["/somewhere/tfwd-train", "--config=quickstart"]
import tfwd_programs
tfwd_programs.train()
"""


def test_a_program_names_the_missing_packages_in_one_line(tmp_path: Path) -> None:
    done = run(PROGRAM, tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        "error: tfwd-train needs rich, tensorboard: in a checkout of tfwd, "
        "pip install '.[programs]'\n"
    )
