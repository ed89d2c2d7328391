"""Random cases: a model, described by small numbers, and a way to run it.

The numbers are taken modulo the number of choices, so that nearly every case is a model. A case
with one step less is a model too, so that failures can be made smaller.
"""

import os
from dataclasses import dataclass, field

import hypothesis.strategies as st

from fuzz import layer_kinds

POLICIES = ["float64"] * 6 + ["float32", "mixed_float16", "mixed_bfloat16"]
if "ONEDNN_MAX_CPU_ISA" in os.environ:  # TensorFlow's bfloat16 products end the process there
    POLICIES.remove("mixed_bfloat16")

# Cases that compile with XLA, or run twice, take several times as long as the others.
SHARES = {
    "eager": 3,
    "function": 4,
    "loop": 2,
    "xla": 1,
    "fit": 3,
    "fit_xla": 1,
    "fit_checked": 2,  # with FiniteCheck
    "fit_checked_xla": 1,
    "replicas": 1,
}
RUNS = tuple(SHARES)
IN_PLACE = (False, False, True)


@dataclass(frozen=True)
class Wrap:
    """A wrapper: "drop", "noise" or "param", its weights, and its strength."""

    kind: str
    pattern: int = 0
    variant: int = 0


@dataclass(frozen=True)
class Part:
    """A layer, the wrappers around it from the inside, and the layers that a nest holds."""

    kind: str
    wraps: tuple[Wrap, ...] = ()
    frozen: bool = False
    held: tuple["Part", ...] = ()


@dataclass(frozen=True)
class Step:
    """A call of a new layer, or another call of an earlier layer."""

    part: Part
    again: bool = False
    form: int = 0
    args: tuple[int, int, int, int] = (0, 0, 0, 0)


@dataclass(frozen=True)
class Mode:
    """A way to run the model.

    Attributes:
        run: one of `RUNS`.
        tensor_flag: True if the training flag is a tensor.
        recompute: the wrappers' argument.
        policy: dtype policy of all layers.
        fresh: True if the first call of a subclassed model is the training call.
        share: True if replicas draw alike.
        slope: True if finite differences check the oracle's gradient.
        untaped: "eager" or "function" if a training call without a tape comes first.
        small: number of entries below which weights are small (`SMALL` of `masks_and_normals.py`).
    """

    run: str = "eager"
    tensor_flag: bool = False
    recompute: bool = True
    policy: str = "float64"
    fresh: bool = False
    share: bool = True
    slope: bool = False
    untaped: bool = False
    small: int = 0


@dataclass(frozen=True)
class Case:
    """A model and a mode.

    Attributes:
        top: "functional", "sequential" (if it can be) or "subclassed".
        whole: parametrization of the model by `tfwd.parametrize`, if any.
        compiled: True if the model is compiled before that.
        in_place: True if the parametrizations are added to the plain model in place.
    """

    steps: tuple[Step, ...]
    top: str = "functional"
    whole: Wrap | None = None
    compiled: bool = False
    in_place: bool = False
    mode: Mode = field(default_factory=Mode)


small = st.integers(0, 3)
wraps = st.builds(Wrap, st.sampled_from(["drop", "param", "noise"]), small, small)
stacks = st.one_of(st.tuples(wraps), st.just(()), st.tuples(wraps), st.tuples(wraps, wraps))
inner = st.builds(
    Part, st.sampled_from(layer_kinds.INNER), stacks, st.sampled_from([False] * 7 + [True])
)


@st.composite
def parts(draw: st.DrawFn) -> Part:
    name = draw(st.sampled_from(layer_kinds.NAMES))
    held = draw(st.tuples(inner, inner)) if name in layer_kinds.NESTS else ()
    if name in layer_kinds.HELD:
        held = (Part(layer_kinds.HELD[name], held[0].wraps),)
    return Part(name, draw(stacks), draw(st.sampled_from([False] * 9 + [True])), held)


# Most models begin with an embedding that masks, or with the plain input.
first = st.builds(Step, st.builds(Part, st.sampled_from(["MaskedEmbedding", "Dense"]), stacks))
steps = st.builds(
    Step,
    parts(),
    st.sampled_from([False, False, False, True]),
    small,
    st.tuples(*[st.sampled_from([0, 0, 1, 2])] * 4),
)


@st.composite
def modes(draw: st.DrawFn, runs: tuple[str, ...] = RUNS) -> Mode:
    return Mode(
        run=draw(st.sampled_from([r for r in RUNS if r in runs for _ in range(SHARES[r])])),
        tensor_flag=draw(st.sampled_from([False, False, False, True])),
        recompute=draw(st.sampled_from([True, True, False])),
        policy=draw(st.sampled_from(POLICIES)),
        fresh=draw(st.booleans()),
        share=draw(st.booleans()),
        slope=draw(st.booleans()),
        untaped=draw(st.sampled_from([False, False, False, True])),
        small=draw(st.sampled_from([0, 12, 1 << 16])),  # none, some, all
    )


@st.composite
def cases(
    draw: st.DrawFn, runs: tuple[str, ...] = RUNS, in_place: tuple[bool, ...] = IN_PLACE
) -> Case:
    some = draw(st.lists(steps, min_size=1, max_size=4))
    if draw(st.booleans()):
        some = [draw(first), *some]
    whole = draw(st.one_of(st.none(), st.none(), st.none(), wraps))
    top = draw(st.sampled_from(["functional", "subclassed", "sequential"]))
    compiled, mode = draw(st.booleans()), draw(modes(runs))
    added = draw(st.sampled_from(in_place))
    if added and draw(st.booleans()):
        whole = draw(wraps)
    return Case(tuple(some), top, whole, compiled, added, mode)
