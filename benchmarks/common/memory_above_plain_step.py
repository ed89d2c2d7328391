"""Peak memory of a training step above the same step without parametrizations."""

from __future__ import annotations

from common import measure
from common.measure import Row, Spread


def layer_stack_step(kind: str, way: str) -> object:
    """Returns a step of `layer_stacks.train_step`. It is called in a child process."""
    measure.equal_threads()
    from common import layer_stacks

    return layer_stacks.train_step(kind, way)


def torch_step(way: str) -> object:
    """Returns a step of `torch_layer_stacks.train_step`. It is called in a child process."""
    from peers import torch_layer_stacks

    return torch_layer_stacks.train_step(way)


def above(with_: list[int] | str, without: list[int] | str, size: int) -> Spread | str:
    """Returns the extra memory of some peaks over the median of other peaks, as a share of `size`.

    Args:
        with_: Peaks in bytes, or a text with the reason why they are missing.
        without: Peaks to compare with, or such a text.
        size: Number of bytes.
    """
    for found in (with_, without):
        if isinstance(found, str):
            return found
    base = Spread.of(without).median  # type: ignore[arg-type]
    return Spread.of([(value - base) / size for value in with_])  # type: ignore[operator]


def shown(share: Spread | str) -> float | str:
    """Returns the median, or the text with the reason why it is missing."""
    return share if isinstance(share, str) else share.median


def rows(name: str, title: str, figure: Spread | str, peers: dict, at_most: float) -> list[Row]:
    """Returns a list with the row of a way, or an empty list if its memory was not measured.

    Args:
        name: Name of the way, for the message that it could not be measured.
        title: Name of the way and its model, for the claim.
        figure: Share of the weights, or a text with the reason why it is missing.
        peers: Shares of the other sides.
        at_most: Goal: the largest share.
    """
    if isinstance(figure, str):
        measure.CONSOLE.print(f"without {name}: {figure}", style="red")
        return []
    claim = f"memory of a step with {title}"
    return [Row(claim, figure, "share of the weights", figure.median, peers, "", at_most=at_most)]
