"""tfwd-tune --program=finetune: sweeps over the keys of a fine-tuning configuration."""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from tfwd.finetune.program import PROGRAM
from tfwd.runs import command_runner
from tfwd.runs.sweeps import tune_command
from tfwd.runs.sweeps.tune_command import define

ABOUT = """
Searches for the best values of config keys. Each trial is a run of tfwd-finetune.

    tfwd-tune --program=finetune --config=finetune --workdir=runs/rates
      --sweep=finetune

The sweep file defines the search:

    from tfwd.runs.sweeps.sweep import Sweep
    from tfwd.tuning import Float

    def get_sweep():
        return Sweep({"optimizer.learning_rate": Float(1e-5, 1e-4, log=True)}, max_trials=5)

The same command resumes a stopped sweep. For hyperband set optimizer.schedule_epochs, so that the
schedule does not depend on the epochs of a trial. Without --program the trials are runs of
tfwd-train. See docs/tuning.md.
"""


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the console script; `argv` as in `app.run`."""
    # The keys must fit together in each trial, and not in the config that the trials change.
    command_runner.run(main, define, ABOUT, schema=PROGRAM.schema, together=False, argv=argv)


def main(values: flags.FlagValues) -> int:
    """Searches, and returns the exit code."""
    return tune_command.main(PROGRAM, values)
