"""Reacts to a step of a run that is not finite: stops, skips the step, or restores an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tfwd.numerics.bad_step_policy import BadStepPolicy, restored
from tfwd.numerics.bad_step_report import Report
from tfwd.numerics.checked_step import variables_in
from tfwd.runs.errors import UserError
from tfwd.runs.interfaces import Failure, Step
from tfwd.runs.training.step_variables import StepVariables

MAX_CONSECUTIVE = 5  # bad steps in a row that a run skips or restores from before it ends
FACTOR = 0.5  # factor of the learning rate, for each restore


class Diverged(UserError):
    """Error that ends a run at a number that is not finite.

    Attributes:
        short: str. Step and layer or weight, such as "diverged at step 7 in layer lstm_1".
        report: the `Report` of the step; `None` if the step is finite and a weight is not.
    """

    def __init__(self, failure: Failure, report: Report | None, kept: str):
        where, found = (report.where, report.what) if report else (failure.weight, failure.found)
        self.short = f"diverged at step {failure.step} in {where}"
        self.report = report
        causes = [] if report is None else [cause.name for cause in report.causes]
        likely = f"; likely cause: {' or '.join(causes)}" if causes else ""
        super().__init__(
            f"{self.short}: {found} (loss {failure.loss:.4g}, gradient norm "
            f"{failure.gradient_norm:.4g}, learning rate {failure.learning_rate:.4g}){likely}; "
            f"{kept}"
        )


class Divergence:
    """The bad steps of a run: their reports, and the reaction to each.

    Args:
        action: "raise", "skip", "restore" or "off".
        step: the training step.
        state: the `StepVariables` with the learning rate.
        objects: the modules whose variables "restore" resets.
        tell: called with a bad step, its report if there is one, and a text for the reaction.
    """

    def __init__(
        self,
        action: str,
        step: Step,
        state: StepVariables,
        objects: Iterable[Any],
        tell: Callable[[Failure, Report | None, str], None],
    ):
        self.action, self._step, self._state = action, step, state
        self._objects, self._tell = list(objects), tell
        self._policy = BadStepPolicy(action, MAX_CONSECUTIVE, FACTOR)
        self._last_bad = self._bad_in_epoch = 0

    @property
    def checks_each_step(self) -> bool:
        """Returns True if each step must be checked at once, so that the next step can be made."""
        return self.action in ("skip", "restore")

    def take_snapshot(self, steps: int | None = None) -> None:
        """Stores the values for "restore", at the end of an epoch and when a run resumes.

        Args:
            steps: int. The number of steps of the epoch. If all of them were bad, the stored values
                are kept. Default None, when a run resumes.
        """
        all_bad = steps is not None and self._bad_in_epoch >= steps
        self._bad_in_epoch = 0
        if self.action == "restore" and not all_bad:
            self._policy.store(variables_in(*self._objects))

    def handle(self, failure: Failure, batch: tuple[Any, ...] | None, kept: str) -> None:
        """Reports a bad step. Then skips it, restores the last epoch, or ends the run.

        Args:
            failure: the bad step.
            batch: the step's batch; `None` if the step is finite and a weight is not.
            kept: str. The end of the error message: advice, last checkpoint, path of the report.

        Raises:
            Diverged: the run ends.
        """
        report = None
        if batch is not None:
            report = self._step.diagnose(*batch)
            report.step = failure.step
        if failure.step != self._last_bad + 1:
            self._policy.good_step()
        self._last_bad = failure.step
        self._bad_in_epoch += 1
        why = "" if batch is None else self._policy.reason_to_stop()
        if why is not None:
            self._tell(failure, report, "the run ends")
            raise Diverged(failure, report, f"{why}; {kept}" if why else kept)
        number = self._state.step.numpy()
        factor = self._policy.leave_behind()
        done = "the step is skipped"
        if self.action == "restore":
            self._state.step.assign(number)
            rate = self._state.learning_rate.numpy() * factor
            self._state.learning_rate.assign(rate)
            done = restored(f"{rate:.4g}")
        self._tell(failure, report, done)
        self._step.resume_after_failure()


def report_text(failure: Failure, report: Report | None, norms: Mapping[str, float]) -> str:
    """Returns the text of a bad step's or a bad weight's report, with the norms of all weights."""
    text = f"{report}\n" if report else f"{failure.weight}: {failure.found}, step {failure.step}\n"
    shown = [f"{norm:9.3g}  {path}" for path, norm in norms.items()]
    return text + "\n".join(["", "norms of the weights", *shown, ""])
