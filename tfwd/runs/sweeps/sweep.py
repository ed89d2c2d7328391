"""Declaration of a sweep: the space over config keys, and the search method."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import ml_collections

from tfwd.runs.errors import UserError, suggest
from tfwd.runs.settings.command_line import call_function_in_file
from tfwd.runs.settings.config import Schema
from tfwd.runs.settings.validators import SEED, is_json_value, shown
from tfwd.tuning.oracles import LARGEST_SEED, METHODS
from tfwd.tuning.search_space import Choice, Float, Int, Spec, size

_MOST_POINTS = 2000  # points that are checked one by one


@dataclasses.dataclass
class Sweep:
    """Search over config keys, which `get_sweep()` of a sweep file returns.

    Args:
        space: dict from a dotted config key to the values to try: `Float`, `Int` or `Choice`.
        method, max_trials, executions_per_trial, factor, iterations, seed: as in
            `tfwd.tuning.tuner`.
    """

    space: Mapping[str, Spec]
    method: str = "random"
    max_trials: int | None = None
    executions_per_trial: int = 1
    factor: int = 3
    iterations: int = 1
    seed: int = 0

    @property
    def trials(self) -> int | None:
        """Returns `max_trials`, or its default for the method."""
        default = 10 if self.method in ("random", "bayesian") else None
        return self.max_trials if self.max_trials is not None else default

    def describe(self) -> dict[str, Any]:
        """Returns the sweep as JSON, without `max_trials`, which a resumed sweep may increase."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["max_trials"]
        return {**fields, "space": {key: str(spec) for key, spec in self.space.items()}}


def load_sweep(given: str, schema: Schema) -> Sweep:
    """Reads a sweep file.

    Raises:
        UserError: there is no such file, its code raises an exception, or its `get_sweep()` does
            not return a `Sweep`.
    """
    sweep = call_function_in_file("sweep", given, "get_sweep", schema)
    if not isinstance(sweep, Sweep):
        raise UserError(f"{given}: get_sweep() returned {type(sweep).__name__}; return a Sweep")
    return sweep


def check(sweep: Sweep, config: ml_collections.ConfigDict, schema: Schema) -> list[str]:
    """Checks a sweep over a configuration, before the first trial.

    Args:
        sweep: the sweep.
        config: the configuration that the trials change.
        schema: the `Schema` of the configuration.

    Returns:
        A note if some points of the space cannot be trained, with the reason for one of them.

    Raises:
        UserError: a key does not exist (the message has similar keys), a key does not take a value,
            a number is out of range, or no point of the space can be trained. Config values that do
            not fit together are not an error if the sweep replaces them with values that fit.
    """
    if not isinstance(sweep.method, str) or sweep.method not in METHODS:
        names = suggest(str(sweep.method), METHODS)
        hint = f" (did you mean {' or '.join(names)}?)" if names else ""
        raise UserError(f"method {sweep.method!r} of the sweep: give {', '.join(METHODS)}{hint}")
    counts = {"executions_per_trial": (1, 1000), "factor": (2, 1000), "iterations": (1, 1000)}
    for name, (least, most) in {**counts, "seed": (0, LARGEST_SEED)}.items():
        _check_count(name, getattr(sweep, name), least, most)
    if sweep.max_trials is not None:
        _check_count("max_trials", sweep.max_trials, 1, 10**9)
        if sweep.method == "hyperband":
            raise UserError(
                f"max_trials={sweep.max_trials} of the sweep: Hyperband's number of trials follows "
                "from training.epochs and factor (see --dry_run); remove max_trials"
            )
    if not isinstance(sweep.space, Mapping) or not sweep.space:
        raise UserError('the sweep has no space: give {"model.weight_dropout": Float(0, 0.7)}')
    for key, spec in sweep.space.items():
        _check_key(key, spec, schema)
    last = sweep.executions_per_trial - 1
    for seed in [config.seed, *(sweep.space["seed"].ends if "seed" in sweep.space else ())]:
        if not SEED.is_valid(seed + last):
            raise UserError(
                f"seed={seed} with executions_per_trial={last + 1}: the last run's seed is "
                f"{seed + last}, and a seed is {SEED.expected}"
            )
    if sweep.method == "hyperband" and "training.epochs" in sweep.space:
        raise UserError(
            "training.epochs in the sweep: Hyperband chooses the epochs of each trial, up to the "
            "config's training.epochs; remove it, or use another method"
        )
    return _check_points(sweep, config, schema)


def apply(
    config: ml_collections.ConfigDict, values: Mapping[str, Any], schema: Schema
) -> ml_collections.ConfigDict:
    """Returns a copy of `config` with other values.

    Raises:
        UserError: the result is not a valid configuration.
    """
    changed = copy.deepcopy(config)
    for key, value in values.items():
        *groups, name = key.split(".")
        parent = changed
        for group in groups:
            parent = parent[group]
        try:
            parent[name] = value
        except (TypeError, ValueError) as error:
            raise UserError(f"{key}={shown(value)}: {str(error).partition(chr(10))[0]}") from error
    schema.check(changed)
    return changed


def _check_count(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UserError(
            f"{name}={shown(value)} of the sweep: give a whole number, at least {least} and at "
            f"most {most}"
        )


def _check_key(key: Any, spec: Any, schema: Schema) -> None:
    if not isinstance(key, str):
        raise UserError(f"the sweep's space has the key {key!r}: give a config key, as a text")
    if not schema.known(key):
        raise UserError(f"in the sweep: {schema.unknown(key)}")
    if not isinstance(spec, (Float, Int, Choice)):
        raise UserError(
            f"{key} in the sweep: give Float(0, 0.7, step=0.1), Int or Choice; it is {spec!r}"
        )
    if key not in schema.keys:  # in optimizer.kwargs: each point is checked with the optimizer
        for value in spec.ends:
            if not is_json_value(value):
                raise UserError(f"{key}={shown(value)} in the sweep: give numbers or texts")
        return
    validator = schema.keys[key].validator
    for value in spec.ends:
        if not validator.is_valid(value):
            raise UserError(f"{key}={shown(value)} in the sweep: give {validator.expected}")


def _check_points(sweep: Sweep, config: ml_collections.ConfigDict, schema: Schema) -> list[str]:
    ends = [spec.ends for spec in sweep.space.values()]
    wrong: list[str] = []
    count = 0
    for point in itertools.islice(itertools.product(*ends), _MOST_POINTS):
        count += 1
        try:
            apply(config, dict(zip(sweep.space, point, strict=True)), schema)
        except UserError as error:
            wrong.append(str(error))
    if count == len(wrong):
        try:
            schema.check(config)
        except UserError as error:
            if str(error) in wrong:  # the error is not in the varied keys
                raise
        raise UserError(f"no point of the sweep can be trained: {wrong[0]}")
    if not wrong:
        return []
    return [f"{len(wrong)} of {count} checked points cannot be trained, for example: {wrong[0]}"]


def points(sweep: Sweep) -> str:
    """Returns the size of the space as text."""
    found = size(sweep.space)
    return "not counted (a continuous range)" if found is None else f"{found:,} points"
