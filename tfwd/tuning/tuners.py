"""A keras-tuner tuner for a Keras model of one's own, with what its own `fit` leaves open.

keras-tuner's Hyperband carries a promoted trial's best weights over, and nothing else: the
optimizer's moments and averages, and the number of the next draw, begin anew. Here each run keeps
its whole state (`state.FullState`), a promoted trial begins with the state that the one before it
ended with, and so does a trial that was stopped.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from typing import Any

import keras
import keras_tuner
import numpy as np
from keras_tuner.engine.trial import Trial
from keras_tuner.errors import FailedTrialError

from tfwd.tuning.oracles import make_oracle
from tfwd.tuning.state import FullState
from tfwd.tuning.workers import ALONE, Steady, role


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
    """A keras-tuner `Tuner`: call its `search` with what `model.fit` takes.

    Run `e` of every trial begins with `keras.utils.set_random_seed(seed + e)`, so that trials
    differ by what is tuned and not by luck. A trial whose objective is not finite in any epoch is
    marked FAILED, as is one that raises; the search goes on. A search that was stopped goes on
    when it is started again with the same directory.

    Args:
        hypermodel: as `tfwd.tuning.rates` makes it, or any that keras-tuner takes.
        objective: what is minimised or maximised, as "val_loss".
        method: "random", "grid", "bayesian" or "hyperband".
        directory: of the sweep.
        max_trials, max_epochs, factor, iterations: as in `make_oracle`.
        executions_per_trial: runs of each trial, whose objectives are averaged.
        seed: of the search and of the runs.
        overwrite: begin anew in a directory that holds a sweep. Else it is gone on with, and it is
            an error if it is over another space.
        worker_timeout: seconds after which the chief of a shared sweep gives up a silent worker.

    Returns:
        The tuner. `tuner.get_best_hyperparameters()` and the rest of keras-tuner's methods work.

    Raises:
        ValueError: a wrong method; the directory holds a sweep over another space.

    Example:

    >>> import tempfile
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
    >>> x = np.ones((8, 3))
    >>> found.search(x, x @ [1.0, 2.0, 3.0], validation_data=(x, x @ [1.0, 2.0, 3.0]), verbose=0)
    >>> found.get_best_hyperparameters()[0].values
    {'dropout/kernel': 0.0}
    """
    space = keras_tuner.HyperParameters()
    if isinstance(hypermodel, keras_tuner.HyperModel):
        hypermodel.declare_hyperparameters(space)
    timeout = None if role() == ALONE else worker_timeout
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
    parent, name = os.path.split(os.path.abspath(os.fspath(directory)))
    return SweepTuner(
        oracle,
        hypermodel,
        seed=seed,
        directory=parent,
        project_name=name,
        executions_per_trial=executions_per_trial,
        overwrite=overwrite,
        worker_timeout=timeout,
    )


class SweepTuner(Steady, keras_tuner.Tuner):
    """What `tuner` makes.

    Args:
        *args, **kwargs: of `Steady` and `keras_tuner.Tuner`.
        seed: of the first run of each trial.
    """

    def __init__(self, *args: Any, seed: int = 0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.seed = seed
        self._execution = 0

    def _populate_initial_space(self) -> None:
        # As keras-tuner does before a trial: else the layers of a model without names of its own
        # are called `dense` there and `dense_1` here, and a pattern fits one of them.
        keras.backend.clear_session()
        super()._populate_initial_space()

    def run_trial(self, trial: Trial, *args: Any, **kwargs: Any) -> Any:
        values = trial.hyperparameters.values
        if "tuner/epochs" in values:  # Hyperband's; its initial epoch is in the promoted state
            kwargs["epochs"] = values["tuner/epochs"]
        self._execution = 0
        return super().run_trial(trial, *args, **kwargs)

    def _build_and_fit_model(self, trial: Trial, *args: Any, **kwargs: Any) -> Any:
        execution, self._execution = self._execution, self._execution + 1
        folder = self._state_folder(trial.trial_id, execution)
        parent = trial.hyperparameters.values.get("tuner/trial_id")
        if parent is not None and not os.path.exists(folder):
            shutil.copytree(self._state_folder(parent, execution), f"{folder}.new")
            os.rename(f"{folder}.new", folder)
        state = FullState(folder)
        callbacks = [*kwargs.pop("callbacks", []), state]
        keras.utils.set_random_seed(self.seed + execution)
        try:
            results = super()._build_and_fit_model(trial, *args, callbacks=callbacks, **kwargs)
        finally:
            gc.collect()
        if isinstance(results, keras.callbacks.History):
            results.history = state.history()
            objective = self.oracle.objective
            if not all(np.isfinite(objective.get_value(epoch)) for epoch in state.epochs):
                raise FailedTrialError(f"{objective.name} is not finite in every epoch")
        return results

    def _state_folder(self, trial_id: str, execution: int) -> str:
        return os.path.join(self.get_trial_dir(trial_id), f"state-{execution}")
