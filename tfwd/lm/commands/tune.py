"""tfwd-tune without --program: sweeps over config keys of a language model."""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from tfwd.lm.program import PROGRAM
from tfwd.runs import command_runner
from tfwd.runs.sweeps import tune_command
from tfwd.runs.sweeps.tune_command import define

ABOUT = """
Searches for the best values of config keys. Each trial is a training run. Shows the results.

    tfwd-tune --config=quickstart --sweep=rates --workdir=runs/rates
    tfwd-tune --config=quickstart --sweep=rates --dry_run

The sweep file defines the search:

    from tfwd.lm.sweeps import Float, Sweep

    def get_sweep():
        return Sweep({"model.weight_dropout": Float(0, 0.7, step=0.1)}, method="grid")

With --program=finetune each trial is a run of tfwd-finetune: tfwd-tune --program=finetune --help.
The same command resumes a stopped sweep. Several machines share a sweep with KERASTUNER_TUNER_ID,
KERASTUNER_ORACLE_IP and KERASTUNER_ORACLE_PORT: see docs/tuning.md.
"""


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the console script; `argv` as in `app.run`."""
    # The keys must fit together in each trial, and not in the config that the trials change.
    command_runner.run(main, define, ABOUT, schema=PROGRAM.schema, together=False, argv=argv)


def main(values: flags.FlagValues) -> int:
    """Searches, and returns the exit code."""
    return tune_command.main(PROGRAM, values)
