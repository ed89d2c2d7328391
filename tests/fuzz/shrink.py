"""Reduction of a failing case that still fails in the same way."""

import dataclasses
import re
import time

from fuzz import compare, model_source
from fuzz.cases import Mode


def found_in(case, must_run=False):
    """Returns the differences of a case; none if it is no model, unless it must be one."""
    try:
        return compare.differences(model_source.functions(model_source.program(case)), case.mode)
    except (ValueError, compare.NoModel):
        if must_run:
            raise
        return []


def signature(found):
    """Returns the signature of a failure: its first sentence without numbers and names."""
    return re.sub(r"'[^']*'|\(.*?\)|[-+]?\d[\d.e+-]*", "_", found[0])[:80] if found else ""


def shrunk(case, found, seconds):
    """Returns the smallest case that was reached, and its differences."""
    wanted = signature(found)
    end = time.monotonic() + seconds
    tried = {model_source.program(case) + str(case.mode)}
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(case):
            if time.monotonic() > end:
                return case, found
            try:
                key = model_source.program(candidate) + str(candidate.mode)
            except ValueError:
                continue
            if key in tried:
                continue
            tried.add(key)
            differences = found_in(candidate)
            if signature(differences) == wanted:
                case, found, smaller = candidate, differences, True
                break
    return case, found


def _smaller(case):
    """Yields simpler cases. The cases that leave out most come first."""
    change = dataclasses.replace
    for index in range(len(case.steps)):
        if len(case.steps) > 1:
            yield change(case, steps=case.steps[:index] + case.steps[index + 1 :])
    plain = Mode()
    for name in ("run", "policy", "tensor_flag", "fresh", "slope"):
        if getattr(case.mode, name) != getattr(plain, name):
            yield change(case, mode=change(case.mode, **{name: getattr(plain, name)}))
    if case.mode.run not in ("eager", "function"):
        yield change(case, mode=change(case.mode, run="function"))
    if case.in_place:
        yield change(case, in_place=False)
    if case.whole:
        yield change(case, whole=None)
    if case.top != "functional":
        yield change(case, top="functional")
    for index, step in enumerate(case.steps):
        for simpler in _smaller_steps(step):
            yield change(case, steps=(*case.steps[:index], simpler, *case.steps[index + 1 :]))


def _smaller_steps(step):
    change = dataclasses.replace
    for part in _smaller_parts(step.part):
        yield change(step, part=part)
    if step.form:
        yield change(step, form=0)
    for place, pick in enumerate(step.args):
        if pick:
            yield change(step, args=(*step.args[:place], 0, *step.args[place + 1 :]))


def _smaller_parts(part):
    change = dataclasses.replace
    yield from part.held
    for index in range(len(part.wraps)):
        yield change(part, wraps=part.wraps[:index] + part.wraps[index + 1 :])
    if part.frozen:
        yield change(part, frozen=False)
    for index, inner in enumerate(part.held):
        for simpler in _smaller_parts(inner):
            if simpler.kind in (inner.kind, "Dense"):
                held = (*part.held[:index], simpler, *part.held[index + 1 :])
                yield change(part, held=held)
        if inner.kind != "Dense":
            dense = change(inner, kind="Dense", held=())
            yield change(part, held=(*part.held[:index], dense, *part.held[index + 1 :]))
