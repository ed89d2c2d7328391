"""Output of a sweep: messages, the table in few columns, times, pictures."""

import dataclasses
import io
import json
import math

import numpy as np
import pytest
import sweep_tools
from matplotlib.figure import Figure
from rich.console import Console

from tfwd.lm.config import SCHEMA, default_config
from tfwd.lm.losses import PERPLEXITY
from tfwd.lm.program import PROGRAM
from tfwd.runs.errors import UserError
from tfwd.runs.sweeps import score_plot, sweep
from tfwd.runs.sweeps.live_table import Board
from tfwd.runs.sweeps.sweep_folder import SweepFolder
from tfwd.runs.sweeps.trial_rows import DONE, FAILED, Row, reasons
from tfwd.runs.training.stop_signals import StopRequest
from tfwd.tuning import Choice, Float, Int, stopwatch

KEYS = (
    "model.weight_dropout",
    "model.variational_noise",
    "model.embedding_dropout",
    "model.input_dropout",
    "optimizer.learning_rate",
)


def board_of(rows, keys, folder, width):
    console = Console(width=width, record=True, force_terminal=False, file=io.StringIO())
    board = Board(
        dict.fromkeys(keys, Float(0, 1)), SweepFolder(folder, PROGRAM), 9, console=console
    )
    board.rows = {row.trial: row for row in rows}
    return board


def rows_of(keys, count=4, first=0.00172345):
    values = {key: float(f"{first * (1 + place):.6g}") for place, key in enumerate(keys)}
    return [
        Row(f"000{number}", DONE, values, math.log(50 + number), epochs=9, budget=9, seconds=61.0)
        for number in range(count)
    ]


@pytest.mark.parametrize("first", [0.00172345, 0.1])
@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_table_cuts_no_head_and_no_value(tmp_path, width, first):
    rows = rows_of(KEYS, first=first)
    rows[1] = dataclasses.replace(rows[1], status=FAILED, loss=None, message="word " * 40)
    rows[2] = dataclasses.replace(rows[2], parent="0003")
    board = board_of(rows, KEYS, tmp_path, width)
    board.console.print(board.table())
    for line in reasons(rows):
        board.console.print(line, markup=False, highlight=False)
    text = board.console.export_text()
    assert "…" not in text and all(len(line) <= width for line in text.splitlines())
    for row in rows:
        line = next(line for line in text.splitlines() if line.strip().startswith(row.trial))
        assert "9/9" in line
    for value in rows[0].values.values():
        assert sum(word.rpartition("=")[2] == f"{value:.6g}" for word in text.split()) == 4
    for key in KEYS:  # whole in the head, in two lines of it, or below with a letter
        name = key.partition(".")[2]
        head, _, end = name.partition("_")
        assert name in text or (f"{head}_" in text and end in text)
    assert text.split().count("word") == 40  # wrapped between words
    assert "failed: trial 0001: word word" in text
    assert "promoted: 0002" in text and "from 0003" in text


def test_three_keys_of_a_promoted_trial_have_folded_heads_in_eighty_columns(tmp_path):
    keys = [KEYS[0], KEYS[4], KEYS[3]]
    rows = rows_of(keys, first=0.0123456)
    rows[0].parent = "0003"
    board = board_of(rows, keys, tmp_path, 80)
    board.console.print(board.table())
    text = board.console.export_text()
    assert "learning_" in text and "a: " not in text and "best," in text and "from 0003" in text


def test_two_keys_have_whole_heads_in_eighty_columns(tmp_path):
    board = board_of(rows_of(KEYS[:2]), KEYS[:2], tmp_path, 80)
    board.console.print(board.table())
    head = board.console.export_text().splitlines()[:3]
    assert any("weight_dropout" in line and "valid perplexity" in line for line in head)


def test_a_worker_does_not_say_which_trial_is_best(tmp_path):
    import keras_tuner
    from keras_tuner.engine.trial import Trial

    said = []
    for whole in (True, False):
        console = Console(width=80, record=True, file=io.StringIO())
        board = Board({}, SweepFolder(tmp_path, PROGRAM), 1, console=console, whole=whole)
        trial = Trial(keras_tuner.HyperParameters(), "0", "COMPLETED")
        for name, value in (("loss", 1.0), ("epochs", 1), ("seconds", 1.0)):
            trial.metrics.register(name, "min")
            trial.metrics.update(name, value)
        board.ended(trial)
        said.append("(best)" in console.export_text())
    assert said == [True, False]


class StopAfter(StopRequest):
    looks = 12

    def __bool__(self):
        StopAfter.looks -= 1
        self.number = 2
        return StopAfter.looks < 0


def test_the_time_of_a_trial_that_was_stopped_counts_all_its_parts(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tfwd.lm.trainer.Trainer", sweep_tools.NoTraining)
    with monkeypatch.context() as patch:
        patch.setattr("tfwd.runs.sweeps.tune_command.StopRequest", StopAfter)
        code, out, _ = run(options="max_trials=1")
    path = tmp_path / "sweep" / "trial_0" / "run-0" / stopwatch.FILE
    assert code == 130 and float(path.read_text()) > 0
    path.write_text("3600\n")
    code, out, _ = run(options="max_trials=1")
    line = next(line for line in out.splitlines() if line.startswith("trial 0  "))
    assert code == 0 and "  1:00:" in line
    # Fewer than there are already: only a message.
    assert run(options="max_trials=2")[0] == 0
    code, out, _ = run(options="max_trials=1")
    assert code == 0 and "max_trials=1 is lower: all trials stay, and no trial is added" in out
    # Another space is named in words.
    state = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert state["space model.weight_dropout"] == "0 to 0.7, step 0.1"
    code, _, err = run('{"model.input_dropout": Float(0, 0.7)}', "max_trials=1")
    assert (
        "space model.weight_dropout is 0 to 0.7, step 0.1 in the folder and not varied now" in err
    )
    assert "space model.input_dropout is not varied in the folder and 0 to 0.7 now" in err


def test_conflicts_of_the_config_that_the_sweep_replaces_are_none(run):
    units = '{"model.hidden_units": Choice([(8,), (6, 8)])}'
    code, out, err = run(units, "", "--dry_run", "--config.model.embedding_dim=8")
    assert (code, err) == (0, "") and "cannot be trained" not in out
    code, _, err = run(sweep_tools.SPACE, "", "--dry_run", "--config.model.embedding_dim=8")
    assert code == 1 and err.startswith("error: model.hidden_units=4: with model.tie_weights")
    code, _, err = run(units, "", "--dry_run", "--config.model.embedding_dim=0")
    assert code == 1 and "model.embedding_dim=0" in err  # wrong by itself
    code, _, err = run(units, "", "--dry_run")
    assert code == 1 and "no point of the sweep can be trained" in err  # embedding_dim is 4


def test_a_config_that_conflicts_only_where_it_is_not_replaced():
    config = default_config()
    config.model.embedding_dim = 64
    with pytest.raises(UserError, match=r"^model.hidden_units=256,128: with"):
        sweep.check(sweep.Sweep({"model.weight_dropout": Float(0, 0.7)}), config, SCHEMA)
    notes = sweep.check(sweep.Sweep({"model.embedding_dim": Choice([64, 128])}), config, SCHEMA)
    assert notes[0].startswith("1 of 2 checked points cannot be trained")


def test_a_sweep_file_that_is_none(run, tmp_path):
    (tmp_path / "plain.py").write_text("x = 1\n")
    (tmp_path / "sweeps.py").write_text("def get_sweep():\n    pass\n")
    code, _, err = run(sweep_tools.SPACE, "", f"--sweep={tmp_path / 'plain.py'}")
    assert code == 1 and err == (
        f"error: {tmp_path / 'plain.py'}: the file has no function get_sweep(), which --sweep "
        "calls; add it\n"
    )
    code, _, err = run(sweep_tools.SPACE, "", f"--sweep={tmp_path / 'nofile.py'}")
    assert code == 1 and "sweep.py, sweeps.py" in err and "plain.py" not in err


def trials(space, values, failed=()):
    return [
        Row(
            str(number),
            FAILED if number in failed else DONE,
            dict(zip(space, point, strict=True)),
            None if number in failed else math.log(20 + number),
            epochs=2,
            budget=2,
        )
        for number, point in enumerate(values)
    ]


SPACE = {"model.weight_dropout": Float(0, 0.7, step=0.1), "model.input_dropout": Float(0, 0.6)}


def drawn(monkeypatch, rows, space):
    """Returns the figure of the plot, which is drawn and not written."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    score_plot.draw(rows, space, PERPLEXITY, "trials.png", "five")
    (figure,) = figures
    figure.draw_without_rendering()
    return figure


def line_of(axes, label):
    return next(line for line in axes.lines if line.get_label().startswith(label))


def test_a_failed_trial_is_counted_in_the_title_and_has_no_height(monkeypatch):
    rows = trials(SPACE, [(0.1, 0.1), (0.2, 0.5), (0.2, 0.3), (0.7, 0.2), (0.4, 0.6)], (1, 3))
    figure = drawn(monkeypatch, rows, SPACE)
    assert figure.get_suptitle() == "five; 2 of 5 trials failed"
    axes = figure.axes[0]
    failed = line_of(axes, "failed: no perplexity")
    assert list(failed.get_xdata()) == [0.2, 0.7]
    heights = failed.get_transform().transform(np.column_stack(failed.get_data()))[:, 1]
    assert (heights > axes.get_window_extent().y1).all()  # above the axis, whatever its scale


def test_each_key_has_a_panel_and_the_best_is_a_star_in_all(monkeypatch):
    space = {**SPACE, "optimizer.name": Choice(["sgd", "adam"]), "data.window": Int(1, 1000)}
    rows = trials(space, [(0.1, 0.3, "adam", 5), (0.4, 0.1, "sgd", 800)])
    figure = drawn(monkeypatch, rows, space)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_xlabel() for axes in panels] == list(space)
    places = [line_of(axes, "best: 20.00, trial 0").get_data() for axes in panels]
    assert [(list(x), list(y)) for x, y in places] == [
        ([x], [pytest.approx(20)]) for x in (0.1, 0.3, 1, 5)
    ]
    assert [text.get_text() for text in panels[2].get_xticklabels()] == ["sgd", "adam"]
    assert len(figure.legends[0].get_texts()) == 2  # once, and not in each panel


def test_choices_stand_one_by_one_and_the_whole_range_is_shown(monkeypatch):
    space = {
        "optimizer.learning_rate": Float(1e-4, 1e-1, log=True),
        "optimizer.weight_decay": Choice([1e30, 0.01, 1.0]),
    }
    first, second = drawn(monkeypatch, trials(space, [(0.01, 1e30)] * 2), space).axes
    assert first.get_xscale() == "log" and first.get_xlim()[0] < 1e-4 < 1e-1 < first.get_xlim()[1]
    assert [text.get_text() for text in second.get_xticklabels()] == ["0.01", "1.0", "1e+30"]
    assert list(line_of(second, "best").get_xdata()) == [2]


def test_a_trial_that_was_stopped_early_is_no_part_of_the_smoothed_line(monkeypatch):
    space = {"model.weight_dropout": Float(0, 0.7, step=0.1)}
    rows = trials(space, [(0.1 * place,) for place in range(8)])
    assert line_of(drawn(monkeypatch, rows, space).axes[0], "smoothed")
    for row in rows[:3]:
        row.epochs = row.budget = 1
    axes = drawn(monkeypatch, rows, space).axes[0]
    assert [len(line_of(axes, label).get_xdata()) for label in ("stopped", "after 2")] == [3, 5]
    assert not any(line.get_label() == "smoothed" for line in axes.lines)


def test_the_live_table_stays_on_the_screen_also_if_its_rows_are_folded(tmp_path):
    board = board_of(rows_of(KEYS, count=40), KEYS, tmp_path, 80)
    board.console.height = 40
    shown = board._shown()
    assert 4 < len(shown.rows) < 40 and len(board.console.render_lines(shown)) <= 40
    assert "values" in [column.header for column in shown.columns]
