"""The final table and the picture."""

import io
import math
import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console
from stack_marks import quick_rows

from tfwd.finetune import confusion_plot
from tfwd.lm.final_report import facts, table
from tfwd.lm.losses import PERPLEXITY
from tfwd.runs.storage import learning_curves

SUMMARY = {
    "level": "word",
    "epochs": 9,
    "best_epoch": 4,
    "texts": {
        "train": {"nats": 4.0, "perplexity": 54.598, "bits": 5.771, "tokens": 67000},
        "test": {"nats": None, "perplexity": None, "bits": None, "tokens": 3400},
    },
    "parameters": 1174698,
    "vocabulary": 4522,
    "tokens_per_second": 9255.2,
}


def records(epochs):
    found = []
    for epoch in range(1, epochs + 1):
        for step in range(3 * epoch - 2, 3 * epoch + 1):
            loss = None if step == 2 else 7 - math.log(step)
            found.append({"kind": "train", "step": step, "loss": loss, "learning_rate": 0.5})
        valid = {"kind": "valid", "epoch": epoch, "best": epoch < 3, "train_perplexity": 90 / epoch}
        found.append({**valid, "perplexity": 100 / epoch})
    return found


def test_table_and_facts():
    out = io.StringIO()
    Console(file=out, width=100).print(table(SUMMARY))
    text = out.getvalue()
    for part in ("train", "54.60", "5.771", "67,000", "bits per word", "not finite"):
        assert part in text
    assert facts(SUMMARY) == (
        "weights of epoch 4 of 9, 1,174,698 parameters, vocabulary of 4,522, "
        "9,255 tokens per second in training"
    )
    assert "second" not in facts({**SUMMARY, "tokens_per_second": None})


@quick_rows("12")
@pytest.mark.parametrize("epochs", [0, 1, 12])
def test_curves_are_a_picture(tmp_path, epochs):
    learning_curves.curves(records(epochs), tmp_path / "curves.png", PERPLEXITY, "a text")
    picture = imread(tmp_path / "curves.png")
    assert picture.shape[0] > 500 and picture.shape[1] > 800
    colours = {tuple(c) for c in (picture[..., :3].reshape(-1, 3) * 255).round().astype(int)}
    for colour in (learning_curves.TRAIN, learning_curves.VALID):
        code = tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
        assert (code in colours) == (epochs > 0)


def test_the_best_epoch_is_marked_where_it_was(monkeypatch):
    figure = learning_curves.Figure()
    axes = figure.add_subplot()
    learning_curves._by_epoch(axes, [r for r in records(12) if r["kind"] == "valid"], "perplexity")
    star = axes.get_lines()[-1]
    np.testing.assert_allclose(star.get_xydata(), [[2, 50.0]])
    assert star.get_label() == "best: 50.00 after epoch 2"
    assert axes.get_yscale() == "log"


def test_axes_are_named_in_the_words_of_the_field(tmp_path, monkeypatch):
    """Checks that plots say "nats per token", "true label" and "predicted label"."""
    names = set()
    own = Figure.savefig

    def savefig(figure, *args, **kwargs):
        for axes in figure.get_axes():
            names.update((axes.get_xlabel(), axes.get_ylabel()))
        return own(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    learning_curves.curves(records(2), tmp_path / "curves.png", PERPLEXITY)
    confusion_plot.draw(np.eye(2), ["a", "b"], tmp_path / "confusion.png")
    assert names >= {"training loss, nats per token", "true label", "predicted label"}
    assert not {name for name in names if re.search(r"\ba token|found|^true$", name)}
