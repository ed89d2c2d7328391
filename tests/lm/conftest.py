"""The fixtures of the language model's runs."""

from language_model_runs import make_run, processes, run  # noqa: F401 (fixtures)
