"""tfwd-tune: sweeps over config keys, alone or with workers on other machines."""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from tfwd.lm.program import PROGRAM
from tfwd.runs.settings import app
from tfwd.runs.sweeps import tune
from tfwd.runs.sweeps.tune import define

ABOUT = """
Searches for the best values of config keys, each trial a training run, and shows what came out.

    tfwd-tune --config=configs/quickstart.py --sweep=configs/sweeps/rates.py --workdir=runs/rates
    tfwd-tune --config=configs/quickstart.py --sweep=configs/sweeps/rates.py --dry_run

The sweep file says what is varied:

    from tfwd.lm.sweeps import Float, Sweep

    def get_sweep():
        return Sweep({"model.weight_dropout": Float(0, 0.7, step=0.1)}, method="grid")

With --program=finetune the runs are those of tfwd-finetune: tfwd-tune --program=finetune --help.
A sweep that was stopped goes on when the same command is given again. Several machines share one by
KERASTUNER_TUNER_ID, KERASTUNER_ORACLE_IP and KERASTUNER_ORACLE_PORT: see docs/tuning.md.
"""


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the console script; `argv` as in `app.run`."""
    # The keys must fit together in each trial, and not in the config that the trials change.
    app.run(main, define, ABOUT, schema=PROGRAM.schema, together=False, argv=argv)


def main(values: flags.FlagValues) -> int:
    """Searches, and returns the exit code."""
    return tune.main(PROGRAM, values)
