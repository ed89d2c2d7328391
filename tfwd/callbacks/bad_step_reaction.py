"""Reaction of `FiniteCheck` to a bad step: raises an error, skips the step or restores an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras

from tfwd.numerics.bad_step_policy import BadStepPolicy, repeated_failure_hint, restored
from tfwd.numerics.bad_step_report import NonFiniteError, Report
from tfwd.numerics.epoch_snapshot import EpochSnapshot
from tfwd.numerics.tensorboard_and_plot_files import Log


class BadStepReaction:
    """Reaction to the bad steps of one `fit`.

    Args:
        policy: the policy, which counts the bad steps.
        snapshot: the snapshot to restore, for "restore". `None` for the other actions.
        log: the log of the training, or `None`.
        bad_weights: function that returns the paths of the weights that are not finite. With
            `states=True` it also checks the states of layers.
        checks_each_step: bool. True if no step is left unchecked.
        end: function that is called before an error is raised.
    """

    def __init__(
        self,
        policy: BadStepPolicy,
        snapshot: EpochSnapshot | None,
        log: Log | None,
        bad_weights: Callable[..., list[str]],
        checks_each_step: bool,
        end: Callable[[], None],
    ):
        self._policy, self._snapshot, self._log = policy, snapshot, log
        self._bad_weights, self._end = bad_weights, end
        self._checks_each_step = checks_each_step

    def react(self, reports: Sequence[Report], is_first: bool) -> str:
        """Skips the last bad step, or restores the end of the last epoch.

        Args:
            reports: the reports of all bad steps.
            is_first: bool. True if the step is the first one of the training.

        Returns:
            The text of a warning.

        Raises:
            NonFiniteError: If the training stops.
        """
        report = reports[-1]
        reason, failures = self._policy.reason_to_stop(), self._policy.failures
        if reason is not None:
            hint = repeated_failure_hint(reports, failures) if self._snapshot is None else ""
            note = f"{reason[:1].upper()}{reason[1:]}." if reason else ""
            self.fail(report, is_first, f"{note} {hint}".strip())
        if self._snapshot is not None:
            what = restored(self._snapshot.restore())
        elif self._are_weights_lost(report):
            self.fail(
                report,
                is_first,
                "Skipping this step does not help: a skipped step changes no weight.",
            )
        else:
            self._policy.leave_behind()
            what = "skipped a step"
        self._finish(report, f"{what[:1].upper()}{what[1:]}.")
        why = "; ".join(cause.name for cause in report.causes)
        why = f" ({why}). {report.causes[0].evidence}" if why else ""
        return f"FiniteCheck: {what}: {report.sentence}{why}"

    def fail(self, report: Report, is_first: bool, note: str = "") -> NoReturn:
        """Ends the training with an error.

        Args:
            report: the report of the bad step.
            is_first: bool. True if the weights may have been non-finite before the training.
            note: str. The beginning of the remark on the report.

        Raises:
            NonFiniteError: Always.
        """
        self._finish(report, f"{note} {self._weights_now(is_first)}".strip())
        self._end()
        raise NonFiniteError(report)

    def _are_weights_lost(self, report: Report) -> bool:
        """Returns True if weights are not finite. Only an unchecked step may have made them so."""
        if report.first is not None and report.first.frame.kind == "weight":
            return True
        return not self._checks_each_step and bool(self._bad_weights(states=False))

    def _finish(self, report: Report, note: str) -> None:
        """Adds a remark to a report, and the report to the log."""
        report.note = f"{report.note} {note}".strip()
        if self._log is not None:
            self._log.report(report)

    def _weights_now(self, is_first: bool) -> str:
        """Describes the state of the weights after a failed training."""
        lost = self._bad_weights(states=is_first)
        if not lost:
            return "The weights have their values from before the step."
        names = ", ".join(f"'{path}'" for path in lost[:3])
        more = f" and {len(lost) - 3} others" if len(lost) > 3 else ""
        if is_first:
            return f"Not finite before this training: {names}{more}. Load an earlier checkpoint."
        each = " Then check each step (every_n_steps=1)."
        again = "" if self._checks_each_step else each
        return (
            f"The weights before the step are lost: {names}{more} {'are' if lost[1:] else 'is'} "
            f"not finite. Load an earlier checkpoint.{again}"
        )


def metric_results(model: keras.Model) -> dict[str, Any]:
    """Returns the results of a model's metrics, except compiled metrics that no step has built."""
    try:
        return dict(model.get_metrics_result())
    except ValueError:  # Keras 3 builds compiled metrics in the first step
        results: dict[str, Any] = {}
        for metric in model.metrics:
            if getattr(metric, "built", True):
                results[metric.name] = metric.result()
        return results


def logs_after_bad_step(model: keras.Model, last: Any, has_good_step: bool) -> Any:
    """Returns the metrics of the epoch's good steps, or the last logs of a custom step.

    Args:
        model: the model.
        last: the logs of the last good step, or `None`.
        has_good_step: bool. True if a step of this epoch was good.
    """
    result = metric_results(model)
    if not isinstance(last, dict) or set(last) == set(result):
        return result
    return last if has_good_step else {key: math.nan for key in last}
