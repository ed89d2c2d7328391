"""Time of both moments of per-example gradients, divided by the time of a plain gradient.

    python benchmarks/gradient_moments.py [NAME ...]

The script compares tfwd with BackPACK (`SumGradSquared`), PyTorch's `torch.func.vmap` and Opacus,
if they are installed and support the model. Each peer runs in turn with the plain gradient of its
own framework. Its time is divided by the time of that gradient. The frameworks do not alternate,
because a run of one framework slows the next run of the other through the processor's caches. A
peer that needs more than a second for a run is timed once.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from common import measure
from common.measure import Row, ratio

MOST_SECONDS = 1.0
# For each name: the model, and the largest ratio of both moments to a plain gradient.
CASES = {
    "mlp": ("MLP 784-512-512-10, batch 256", 1.3),
    "wide": ("MLP 4 x 1024, batch 256", 1.25),
    "sequence": ("Dense 128-256-256-10, batch 32, time 64", 1.4),
    "conv": ("convolutions 3-32-64 on 32 x 32, batch 32", 1.5),
    "embedding": ("Embedding 2000 x 64 and a Dense, batch 64, time 32", 1.6),
    "lstm": ("LSTM 64 to 128, time 32, batch 16", 1.7),
    "lm": ("the quickstart's layers, batch 32, time 35", 1.7),
}
PEERS = ("BackPACK", "PyTorch vmap", "Opacus")


def once(run: Callable[[], Any]) -> float:
    """Returns the seconds of one run."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def over_plain(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float | str]:
    """Returns the ratio of each peer's time to `plain`, or "cannot" for a peer that failed."""
    quick, slow = {"plain": runs["plain"]}, {}
    found: dict[str, float | str] = {}
    for peer in [name for name in runs if name != "plain"]:
        warm = measure.attempt(lambda peer=peer: min(once(runs[peer]) for _ in range(2)), peer)
        if warm is None:
            found[peer] = "cannot"
        else:
            (slow if warm > MOST_SECONDS else quick)[peer] = runs[peer]
    times = measure.alternate(quick, seconds=seconds, title="PyTorch")
    if slow:
        times |= measure.alternate(slow, rounds=1, warmup=0, title="PyTorch, once")
    base = times.pop("plain")
    for peer, took in times.items():
        found[peer] = (
            took[0] / statistics.median(base) if peer in slow else ratio(took, base).median
        )
    return found


def row(name: str, seconds: float, torch_moments: Any | None) -> tuple[Row, float]:
    """Measures a case, and returns its row and the milliseconds of tfwd's plain gradient."""
    from common import gradient_moments_cases

    title, limit = CASES[name]
    case = gradient_moments_cases.CASES[name]()
    times = measure.alternate(
        gradient_moments_cases.ours(case), seconds=seconds, rounds=200, title=title
    )
    peers: dict[str, float | str] = {}
    if torch_moments is None:
        peers = dict.fromkeys(PEERS, "not installed")
    elif name in torch_moments.MODELS:
        there = torch_moments.runs(name, case.x, case.y)
        peers = over_plain(there, seconds)
    figure = ratio(times["tfwd"], times["plain"])
    claim = f"both moments of the gradients, {title}"
    made = Row(claim, figure, "time over a plain gradient", figure.median, peers, "", limit)
    return made, 1e3 * statistics.median(times["plain"])


def main() -> None:
    """Measures, and reports a row for each case."""
    options = measure.parser(__doc__, seconds=4.0, of="a case's rounds")
    options.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(CASES)}")
    chosen = options.parse_args()
    unknown = [name for name in chosen.names if name not in CASES]
    if unknown:
        options.error(f"unknown case {', '.join(unknown)}: give some of {', '.join(CASES)}")
    torch_moments = measure.module("peers.torch_moments", "PyTorch")
    measure.equal_threads()
    import keras

    rows, plain = [], {}
    for name in chosen.names or CASES:
        made, plain[name] = row(name, chosen.seconds, torch_moments)
        rows.append(made)
        keras.backend.clear_session()
        gc.collect()
    measure.report("gradient_moments", rows, plain_milliseconds=plain)


if __name__ == "__main__":
    main()
