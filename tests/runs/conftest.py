"""Fixtures: runs of the language model, which is the first program of `tfwd.runs`."""

from language_model_runs import make_run, processes, run  # noqa: F401 (fixtures)
