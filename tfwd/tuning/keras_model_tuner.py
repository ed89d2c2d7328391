"""keras-tuner tuner for a user's Keras model, whose stopped trials resume from their last epoch.

keras-tuner's Hyperband transfers only the best weights to a promoted trial. The optimizer's moments
and averages, and the counter of the draws, start from scratch. Here each run stores its whole state
(`callbacks.FullState`). A promoted trial starts from the last state of the trial that was promoted.
A stopped trial resumes from its own last state.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from typing import Any

import keras
import keras_tuner
import numpy as np
from keras_tuner.engine.trial import Trial
from keras_tuner.errors import FailedTrialError

from tfwd import _keras
from tfwd.tuning import search_record, stopwatch
from tfwd.tuning.chief_and_workers import ALONE, WORKER, role
from tfwd.tuning.fault_tolerant_tuner import FaultTolerantTuner
from tfwd.tuning.oracles import make_oracle
from tfwd.tuning.parent_run_copy import copy_parent_run
from tfwd.tuning.progress_reporter import TrialReporter
from tfwd.tuning.trial_callbacks import FullState, HasObjective
from tfwd.tuning.trial_failure_reasons import reason


def tuner(
    hypermodel: keras_tuner.HyperModel | Callable[[keras_tuner.HyperParameters], keras.Model],
    objective: str | keras_tuner.Objective = "val_loss",
    *,
    method: str = "random",
    directory: str | os.PathLike[str] = "sweep",
    max_trials: int | None = None,
    executions_per_trial: int = 1,
    max_epochs: int = 27,
    factor: int = 3,
    iterations: int = 1,
    seed: int = 0,
    overwrite: bool = False,
    worker_timeout: float = 60.0,
) -> SweepTuner:
    """Makes a keras-tuner `Tuner`, whose `search` takes the arguments of `model.fit`.

    Run `e` of every trial starts with `keras.utils.set_random_seed(seed + e)`. Trials therefore
    differ only by their hyperparameters. A trial fails if it raises an error, or if its objective
    is not finite in at least one epoch. A line prints the reason, and the search continues. A
    stopped search resumes if it is started again with the same directory.

    `search` prints a line before and after each trial, unless its `verbose` is 0. Keras's progress
    bars follow `verbose` too. `search` raises

    - a RuntimeError at its end, if no trial succeeded;
    - a ValueError after the first epoch, if the logs do not have the objective. Either
      `validation_data` is missing, or the name is wrong;
    - a ValueError at the start, if it gets `epochs` with "hyperband". Pass `max_epochs` to `tuner`.

    Args:
        hypermodel: Result of `tfwd.tuning.rates`, another `keras_tuner.HyperModel`, or a function
            of `hp` that returns a compiled model.
        objective: str or `keras_tuner.Objective`. Name of the value that is minimised or maximised.
            Default "val_loss".
        method: "random", "grid", "bayesian" or "hyperband". Default "random".
        directory: str or path. Folder of the sweep. Default "sweep".
        max_trials: int. Maximum number of trials. Hyperband ignores it, because its number of
            trials follows from its epochs. Default None, for the whole grid, or for 10 trials of
            another method.
        executions_per_trial: int. Number of runs of a trial. Their objectives are averaged. Default
            1.
        max_epochs: int. Epochs of Hyperband's longest trials. Default 27.
        factor: int. Each round of Hyperband has fewer trials than the previous round by this
            factor, with more epochs. Default 3.
        iterations: int. Number of times that Hyperband repeats the search. Default 1.
        seed: int. Seed of the search and of the runs. Default 0.
        overwrite: bool. True removes an existing sweep in the directory. Default False, which
            resumes this sweep. It must be the same sweep, except that `max_trials` may increase.
        worker_timeout: float. For several machines. The chief gives a trial to another worker if
            its worker has not reported for this number of seconds. Default 60.

    Returns:
        The tuner. `tuner.get_best_hyperparameters()` and the other methods of keras-tuner work. If
        no trial succeeded, the methods that return the best trials raise RuntimeError.

    Raises:
        ValueError: If the method is unknown; if the new model has no weights (on Keras 3); if the
            directory contains another sweep. Its space, method, objective, seed, number of
            executions and Hyperband's arguments must be the same. The message lists the
            differences.

    Example:
    >>> import keras, numpy as np, tempfile
    >>> from tfwd import tuning
    >>> def make_model():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    ...     return model
    >>> found = tuning.tuner(
    ...     tuning.rates(make_model, {"kernel": tuning.Choice([0.0, 0.5])}),
    ...     method="grid",
    ...     directory=tempfile.mkdtemp(),
    ... )
    >>> x = np.eye(3)[np.arange(300) % 3]
    >>> y = x @ [1.0, 2.0, 3.0]
    >>> found.search(x, y, validation_data=(x, y), epochs=20, verbose=0)
    >>> found.get_best_hyperparameters()[0].values
    {'dropout/kernel': 0.0}
    """
    space = keras_tuner.HyperParameters()
    if isinstance(hypermodel, keras_tuner.HyperModel):
        hypermodel.declare_hyperparameters(space)
    mine = role()
    timeout = None if mine == ALONE else worker_timeout
    oracle = make_oracle(
        method,
        objective,
        space if space.space else None,
        max_trials=max_trials,
        max_epochs=max_epochs,
        factor=factor,
        iterations=iterations,
        seed=seed,
        worker_timeout=timeout,
    )
    rounds = {"max_epochs": max_epochs, "factor": factor, "iterations": iterations}
    described = search_record.describe(oracle, method, seed, executions_per_trial, **rounds)
    folder = os.path.abspath(os.fspath(directory))
    overwrite = overwrite and mine != WORKER  # the chief's sweep exists already
    if not overwrite:
        search_record.verify(folder, described)
    parent, name = os.path.split(folder)
    return SweepTuner(
        oracle,
        hypermodel,
        seed=seed,
        described=described,
        directory=parent,
        project_name=name,
        executions_per_trial=executions_per_trial,
        overwrite=overwrite,
        worker_timeout=timeout,
    )


class SweepTuner(FaultTolerantTuner, keras_tuner.Tuner):
    """keras-tuner tuner that `tuner` returns.

    Args:
        *args, **kwargs: the arguments of `FaultTolerantTuner` and `keras_tuner.Tuner`.
        seed: int. The seed of the first run of each trial.
        described: dict of the search, from `search_record.describe`.
    """

    def __init__(
        self, *args: Any, seed: int = 0, described: Mapping[str, Any] | None = None, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self.seed, self._described = seed, dict(described or {})
        self._execution = 0
        self._reporter = TrialReporter(self.oracle, self.get_trial_dir)
        self.watch(self._reporter)

    def search(self, *args: Any, **kwargs: Any) -> None:
        """Searches as keras-tuner does, and prints the progress; `tuner` lists the exceptions."""
        self._reporter.verbose = kwargs.get("verbose") != 0
        if self._described.get("method") == "hyperband" and "epochs" in kwargs:
            raise ValueError(
                f"epochs={kwargs['epochs']}: Hyperband chooses the epochs of each trial; "
                "give max_epochs to `tuner`, and no epochs to `search`"
            )
        if role() == WORKER:
            super().search(*args, **kwargs)
            return
        described = {**self._described, "epochs": kwargs.get("epochs", 1)}
        search_record.verify(self.project_dir, described)
        search_record.write(self.project_dir, described)
        if self.oracle.end_order:
            done = len(self.oracle.end_order)
            self._reporter.line(f"resuming in {self.project_dir}: {done} trials are done")
        super().search(*args, **kwargs)
        self._best_trials(1)

    def get_best_hyperparameters(self, num_trials: int = 1) -> list[keras_tuner.HyperParameters]:
        """Returns the hyperparameters of the best trials that succeeded.

        Raises:
            RuntimeError: no trial succeeded.
        """
        return [trial.hyperparameters for trial in self._best_trials(num_trials)]

    def get_best_models(self, num_models: int = 1) -> list[keras.Model]:
        """Returns the models of the best trials that succeeded.

        Raises:
            RuntimeError: no trial succeeded.
        """
        return [self.load_model(trial) for trial in self._best_trials(num_models)]

    def _best_trials(self, count: int) -> list[Trial]:
        best = self.oracle.get_best_trials(count)
        if best:
            return best
        if self._is_worker():  # only the chief has the other trials
            raise RuntimeError("no trial has succeeded")
        failed = [self.oracle.trials[name] for name in self.oracle.end_order]
        first = [(t.trial_id, reason(t, self.get_trial_dir(t.trial_id))) for t in failed[:1]]
        why = "".join(f"; trial {number}: {text}" for number, text in first)
        raise RuntimeError(f"none of the {len(failed)} finished trials succeeded{why}")

    def _populate_initial_space(self) -> None:
        # keras-tuner also does this before a trial. Otherwise an unnamed layer would be called
        # `dense` there and `dense_1` here, and a pattern would match only one of them.
        keras.backend.clear_session()
        build = self.hypermodel.build

        def checked(hp: keras_tuner.HyperParameters) -> keras.Model:
            model = build(hp)
            if isinstance(model, keras.Model) and not _keras.training.can_back_up(model):
                raise ValueError(
                    f"model '{model.name}' has no weights when it is made, and a trial's backup "
                    "needs them before training: build the model in the function that makes it, "
                    "with model.build((None, 8)) or a call on a batch"
                )
            return model

        self.hypermodel.build = checked
        try:
            super()._populate_initial_space()
        finally:
            self.hypermodel.build = build

    def run_trial(self, trial: Trial, *args: Any, **kwargs: Any) -> Any:
        values = trial.hyperparameters.values
        if "tuner/epochs" in values:  # Hyperband sets it. The promoted state has the initial epoch
            kwargs["epochs"] = values["tuner/epochs"]
        self._execution = 0
        return super().run_trial(trial, *args, **kwargs)

    def _build_and_fit_model(self, trial: Trial, *args: Any, **kwargs: Any) -> Any:
        execution, self._execution = self._execution, self._execution + 1
        folder = self._state_folder(trial.trial_id, execution)
        parent = trial.hyperparameters.values.get("tuner/trial_id")
        if parent is not None:
            copy_parent_run(self._state_folder(parent, execution), folder)
        state = FullState(folder)
        callbacks = [*kwargs.pop("callbacks", []), state]
        if type(self.hypermodel).fit is keras_tuner.HyperModel.fit:  # a custom `fit` may measure it
            callbacks.insert(-1, HasObjective(self.oracle.objective))
        keras.utils.set_random_seed(self.seed + execution)
        watch = state.watch = stopwatch.Stopwatch(folder)
        try:
            results = super()._build_and_fit_model(trial, *args, callbacks=callbacks, **kwargs)
        finally:
            watch.save()
            gc.collect()
        if isinstance(results, keras.callbacks.History):
            results.history = state.history()
            objective = self.oracle.objective
            if not all(np.isfinite(objective.get_value(epoch)) for epoch in state.epochs):
                raise FailedTrialError(f"{objective.name} is not finite in at least one epoch")
        return results

    def _state_folder(self, trial_id: str, execution: int) -> str:
        return os.path.join(self.get_trial_dir(trial_id), f"state-{execution}")
