"""Peak memory of a training step above the same step without perturbation."""

from __future__ import annotations

from common import measure
from common.measure import Row, Spread


def workload_step(kind: str, way: str) -> object:
    """Returns a step of `workloads.train_step`; for a child."""
    measure.equal_threads()
    from common import workloads

    return workloads.train_step(kind, way)


def torch_step(way: str) -> object:
    """Returns a step of `torch_workloads.train_step`; for a child."""
    from peers import torch_workloads

    return torch_workloads.train_step(way)


def above(with_: list[int] | str, without: list[int] | str, size: int) -> Spread | str:
    """Returns by which share of `size` bytes one peak exceeds the median of the other.

    Args:
        with_: peaks in bytes, or a text that says why there are none.
        without: the peaks to compare with, or such a text.
        size: number of bytes.
    """
    for found in (with_, without):
        if isinstance(found, str):
            return found
    base = Spread.of(without).median  # type: ignore[arg-type]
    return Spread.of([(value - base) / size for value in with_])  # type: ignore[operator]


def shown(share: Spread | str) -> float | str:
    """Returns the median, or the text that says why there is none."""
    return share if isinstance(share, str) else share.median


def rows(name: str, title: str, figure: Spread | str, peers: dict, at_most: float) -> list[Row]:
    """Returns the row of a way; no row if its memory could not be measured.

    Args:
        name: the way, for the message that it could not be measured.
        title: the way and its model, for the claim.
        figure: the share of the weights, or a text that says why there is none.
        peers: the shares of the other sides.
        at_most: the largest share that is to be reached.
    """
    if isinstance(figure, str):
        measure.CONSOLE.print(f"without {name}: {figure}", style="red")
        return []
    claim = f"memory of a step with {title}"
    return [Row(claim, figure, "share of the weights", figure.median, peers, "", at_most=at_most)]
