"""Search for failing cases: draws cases, runs each once, and returns the failures."""

import re
import time
from collections.abc import Iterator
from typing import NamedTuple

import hypothesis

from fuzz import cases, compare, model_source, shrink


class Failure(NamedTuple):
    """A failing case, made small, and its differences."""

    case: cases.Case
    found: list[str]
    drawn: cases.Case  # as it was before


class Hunt:
    """A series of random cases.

    Args:
        seed: seed of the drawn cases.
        seconds: longest time to make one failure smaller.
        again: number of failures with one signature that are made smaller. More are only counted.

    Attributes:
        ran: number of cases that ran.
        by_mode: number of cases that ran, by mode.
        no_model: number of cases that plain Keras could not make or run.
        counts: number of failures with each signature.
    """

    def __init__(self, seed: int, seconds: float = 60.0, again: int = 2) -> None:
        self.seed = seed
        self.seconds = seconds
        self.again = again
        self.ran = 0
        self.no_model: list[str] = []
        self.by_mode: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self._seen: set[str] = set()

    def run(
        self,
        many: int,
        until: float = float("inf"),
        runs: tuple[str, ...] = cases.RUNS,
        in_place: tuple[bool, ...] = cases.IN_PLACE,
    ) -> Iterator[Failure]:
        """Runs a number of different cases, or runs until a time of `time.monotonic()`."""
        for case in self._drawn(many, runs, in_place):
            if time.monotonic() > until or self.ran >= many:
                return
            try:
                program = model_source.functions(model_source.program(case))
                found = compare.differences(program, case.mode)
            except compare.NoModel as error:
                self.no_model.append(f"{case.mode.run}: {error}")
                continue
            self.ran += 1
            self.by_mode[case.mode.run] = self.by_mode.get(case.mode.run, 0) + 1
            if not found:
                continue
            signature = shrink.signature(found)
            self.counts[signature] = self.counts.get(signature, 0) + 1
            if self.counts[signature] <= self.again:
                yield Failure(*shrink.shrunk(case, found, self.seconds), case)

    def _drawn(
        self, many: int, runs: tuple[str, ...], in_place: tuple[bool, ...]
    ) -> list[cases.Case]:
        """Returns different cases that are models, as Hypothesis draws them.

        Equal seeds give equal cases.
        """
        result: list[cases.Case] = []

        @hypothesis.seed(self.seed)
        @hypothesis.settings(
            max_examples=12 * many,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(cases.cases(runs, in_place))
        def draw(case: cases.Case) -> None:
            try:
                text = model_source.program(case)
            except ValueError:
                return
            # Hypothesis varies its draws; models without a relevant difference count as one.
            key = f"{case.mode.run}{re.sub('[0-9]', '', text)}"
            if key not in self._seen:
                self._seen.add(key)
                result.append(case)

        draw()
        return result
