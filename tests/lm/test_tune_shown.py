"""What a sweep shows: messages, the table in few columns, the times, the pictures."""

import dataclasses
import io
import itertools
import json
import math

import numpy as np
import pytest
import sweep_tools
from matplotlib.figure import Figure
from rich.console import Console

from tfwd.lm import tune
from tfwd.lm.config import default_config
from tfwd.lm.errors import UserError
from tfwd.lm.signals import StopRequest
from tfwd.lm.sweeps import plots, scales, sweep
from tfwd.lm.sweeps.board import Board
from tfwd.lm.sweeps.folder import SweepFolder
from tfwd.lm.sweeps.rows import DONE, FAILED, Row
from tfwd.lm.sweeps.table import reasons
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
    board = Board(dict.fromkeys(keys, Float(0, 1)), SweepFolder(folder), 9, console=console)
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
    assert "goes on as 0002" in text and "from 0003" in text


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
        board = Board({}, SweepFolder(tmp_path), 1, console=console, whole=whole)
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
    monkeypatch.setattr("tfwd.lm.sweeps.trial.Trainer", sweep_tools.NoTraining)
    with monkeypatch.context() as patch:
        patch.setattr(tune, "StopRequest", StopAfter)
        code, out, _ = run(options="max_trials=1")
    path = tmp_path / "sweep" / "trial_0" / "run-0" / stopwatch.FILE
    assert code == 130 and float(path.read_text()) > 0
    path.write_text("3600\n")
    code, out, _ = run(options="max_trials=1")
    line = next(line for line in out.splitlines() if line.startswith("trial 0  "))
    assert code == 0 and "  1:00:" in line
    # Fewer than there are already: said, and nothing else happens.
    assert run(options="max_trials=2")[0] == 0
    code, out, _ = run(options="max_trials=1")
    assert code == 0 and "max_trials=1 is fewer: all stay, and none is added" in out
    # Another space is named in words.
    state = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert state["space model.weight_dropout"] == "0 to 0.7, step 0.1"
    code, _, err = run('{"model.input_dropout": Float(0, 0.7)}', "max_trials=1")
    assert "space model.weight_dropout is 0 to 0.7, step 0.1 there and not varied here" in err
    assert "space model.input_dropout is not varied there and 0 to 0.7 here" in err


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
        sweep.check(sweep.Sweep({"model.weight_dropout": Float(0, 0.7)}), config)
    notes = sweep.check(sweep.Sweep({"model.embedding_dim": Choice([64, 128])}), config)
    assert notes[0].startswith("1 of 2 points looked at cannot be trained")


def test_a_sweep_file_that_is_none(run, tmp_path):
    (tmp_path / "plain.py").write_text("x = 1\n")
    (tmp_path / "sweeps.py").write_text("def get_sweep():\n    pass\n")
    code, _, err = run(sweep_tools.SPACE, "", f"--sweep={tmp_path / 'plain.py'}")
    assert code == 1 and err == (
        f"error: {tmp_path / 'plain.py'}: there is no get_sweep() in it, which --sweep needs\n"
    )
    code, _, err = run(sweep_tools.SPACE, "", f"--sweep={tmp_path / 'nofile.py'}")
    assert code == 1 and "sweep.py, sweeps.py" in err and "plain.py" not in err


def test_the_advice_to_clip_is_none_where_nothing_is_clipped(run):
    more = ["--config.optimizer.name=sgd", "--config.optimizer.clip_norm=0"]
    code, _, err = run('{"optimizer.learning_rate": Choice([1e30])}', 'method="grid"', *more)
    assert code == 1 and "or clipping (optimizer.clip_norm is 0: off) may help" in err


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


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels(which="both") if label.get_text()]


@pytest.mark.parametrize(
    ("spec", "texts"),
    [
        (Float(1e-4, 1e-1, log=True), ["0.0001", "0.001", "0.01", "0.1"]),
        (Float(2e-3, 9e-2, log=True), ["0.002", "0.005", "0.01", "0.02", "0.05"]),
        (Float(3e-3, 2e-2, log=True), ["0.003", "0.005", "0.007", "0.01", "0.02"]),
        (Float(1e-5, 1, step=10, log=True), ["1e-05", "0.001", "0.1"]),
        (Float(0, 0.7, step=0.1), ["0", "0.2", "0.4", "0.6"]),
        (Float(0, 0.6, step=0.15), ["0", "0.15", "0.3", "0.45", "0.6"]),
        (Int(10, 70, step=15), ["10", "25", "40", "55", "70"]),
        (Int(1, 1000), ["200", "400", "600", "800", "1000"]),
        (Choice([0.01, 1e30, 1.0]), ["0.01", "1.0", "1e+30"]),
        (Choice([1, 2, 4]), ["1", "2", "4"]),
        (Choice(["sgd", "adam"]), ["sgd", "adam"]),
    ],
)
def test_ticks_are_few_and_at_values_that_can_occur(spec, texts):
    scale = scales.Scale(spec)
    axes = Figure(dpi=100).add_subplot()
    scale.label(axes.xaxis, 5)
    axes.figure.draw_without_rendering()
    assert labels(axes.xaxis) == texts
    boxes = [label.get_window_extent() for label in axes.xaxis.get_ticklabels()]
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_choices_over_huge_numbers_are_told_apart():
    scale = scales.Scale(Choice([1e30, 0.01, 1.0]))
    assert [scale.share(value) for value in (0.01, 1.0, 1e30)] == [0, 0.5, 1]


SPACE = {"model.weight_dropout": Float(0, 0.7, step=0.1), "model.input_dropout": Float(0, 0.6)}


def test_a_failed_trial_is_counted_in_the_title_and_has_no_height(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure) or path)
    rows = trials(SPACE, [(0.1, 0.1), (0.2, 0.5), (0.2, 0.3), (0.7, 0.2), (0.4, 0.6)], (1, 3))
    plots.draw(rows, SPACE, tmp_path, "five")
    assert len(figures) == 4
    assert {figure.get_suptitle() for figure in figures} == {"five; 2 of 5 trials failed"}
    axes = figures[0].axes[0]
    failed = next(line for line in axes.lines if line.get_label() == "failed: no perplexity")
    assert list(failed.get_xdata()) == [0.2, 0.7]
    figures[0].draw_without_rendering()
    heights = failed.get_transform().transform(np.column_stack(failed.get_data()))[:, 1]
    assert (heights > axes.get_window_extent().y1).all()  # above the axis, whatever its scale


def test_no_line_hides_another_and_the_best_lies_below(tmp_path):
    space = {**SPACE, "model.hidden_dropout": Choice([0.0, 0.5])}
    rows = trials(space, [(0.1, 0.3, 0.5)] * 3)
    figure = Figure()
    plots.together(figure, rows, space)
    lines = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 3]
    (band,) = (line for line in lines if line.get_linewidth() > 3)
    thin = [line for line in lines if line is not band]
    assert band.get_alpha() < 0.5 and all(band.get_zorder() < line.get_zorder() for line in thin)
    heights = np.array([line.get_ydata() for line in thin])
    assert len(thin) == 3 and all(len(set(column)) == 3 for column in heights.T)


def test_the_star_has_a_legend_and_the_colour_of_its_perplexity():
    rows = trials(SPACE, [(0.1, 0.1), (0.2, 0.5), (0.3, 0.3)])
    figure = Figure()
    plots.pairs(figure, rows, SPACE)
    (star,) = (line for line in figure.axes[0].lines if line.get_marker() == "*")
    colour = scales.colours([20, 21, 22])
    assert star.get_color() == scales.colour_of(colour, 20.0)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["best: 20.00"]
    assert labels(figure.axes[1].yaxis) == ["20", "20.5", "21", "21.5", "22"]  # the bar


def test_a_single_trial_has_no_range_of_colours():
    rows = trials(SPACE, [(0.1, 0.1)])
    for draw in (plots.pairs, plots.together):
        figure = Figure()
        draw(figure, rows, SPACE)
        assert len(figure.axes) == 1


def test_the_live_table_stays_on_the_screen_also_if_its_rows_are_folded(tmp_path):
    board = board_of(rows_of(KEYS, count=40), KEYS, tmp_path, 80)
    board.console.height = 40
    shown = board._shown()
    assert 4 < len(shown.rows) < 40 and len(board.console.render_lines(shown)) <= 40
    assert "values" in [column.header for column in shown.columns]
