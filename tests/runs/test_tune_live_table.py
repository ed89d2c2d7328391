"""The live table of a sweep."""

import math
import os

import keras_tuner
from rich.console import Console

from tfwd.lm.program import PROGRAM
from tfwd.runs.sweeps.live_table import Board
from tfwd.runs.sweeps.sweep_folder import SweepFolder
from tfwd.tuning import Float
from tfwd.tuning.oracles import make_oracle
from tfwd.tuning.search_space import hyperparameters


def test_the_live_table_shows_running_trials(tmp_path):
    space, now = {"model.weight_dropout": Float(0, 0.7, step=0.1)}, [0.0]
    with open(os.devnull, "w") as nowhere:
        console = Console(width=90, height=14, record=True, force_terminal=True, file=nowhere)
        folder = SweepFolder(tmp_path, PROGRAM)
        board = Board(space, folder, 4, (0, 1), console=console, clock=lambda: now[0])
        board.total = 8
        objective = keras_tuner.Objective("loss", "min")
        oracle = make_oracle("grid", objective, hyperparameters(space), watcher=board)
        oracle._set_project_dir(str(tmp_path), "sweep")

        def shown():
            console.print(board._shown())
            return console.export_text()

        first = oracle.create_trial("one")
        board.progress(first.trial_id, 1, 2, 0.5, math.log(50))
        now[0] = 75.0
        text = shown()
        for part in ("0 of 8 trials", "50.00", "2/4", "1:15", "run 2 of 2, 50% of an epoch"):
            assert part in text
        for number in range(8):
            trial = first if number == 0 else oracle.create_trial("one")
            if number == 3:
                trial.status, trial.message = "INVALID", "Traceback\nValueError: too bad"
            else:
                metrics = {"loss": math.log(60 + number), "loss-0": 1.0, "epochs": 4}
                oracle.update_trial(trial.trial_id, {**metrics, "seconds": 61.0})
                trial.status = "COMPLETED"
            oracle.end_trial(trial)
        text = shown()
        assert "trial 0003 failed: ValueError: too bad" in text
        assert "8 of 8 trials" in text and "60.00" in text and "1:01" in text
        assert "best" in next(line for line in text.splitlines() if line.startswith(" 0000 "))
        rows = [line for line in text.splitlines() if line[1:5].isdigit()]
        assert len(rows) == 6  # the rows that fit
        assert any(line.startswith(" 0007 ") for line in rows)  # the newest is among them
