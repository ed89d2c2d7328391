"""Growth of the time of both moments of per-example gradients with the batch, from 8 to 1024.

    python benchmarks/gradient_moments_growth.py

The model is the first model of gradient_moments.py, an MLP 784-512-512-10. The figure is the
exponent of the batch: the slope of log(time) over log(batch), by least squares. An exponent of 1 is
linear growth. A loop over the examples that reads the whole batch each time would grow faster.
"""

from __future__ import annotations

from common import measure
from common.measure import Row, Spread

BATCHES = [8, 32, 128, 512, 1024]
LIMIT = 1.1


def main() -> None:
    """Measures, and reports a row."""
    seconds = measure.parser(__doc__, seconds=25.0).parse_args().seconds
    measure.equal_threads()
    import numpy as np
    from common import gradient_moments_cases

    runs = {}
    for batch in BATCHES:
        sides = gradient_moments_cases.ours(gradient_moments_cases.mlp([784, 512, 512], batch))
        runs |= {f"{side} {batch}": run for side, run in sides.items()}
    found = measure.alternate(runs, seconds=seconds, calls=3, title="batch")

    def exponents(side: str) -> Spread:
        rounds = zip(*(found[f"{side} {batch}"] for batch in BATCHES), strict=True)
        sizes = np.log(BATCHES)
        return Spread.of([float(np.polyfit(sizes, np.log(turn), 1)[0]) for turn in rounds])

    figure, plain = exponents("tfwd"), exponents("plain")
    claim = "growth of both moments with the batch, 8 to 1024, MLP 784-512-512-10"
    peers: dict[str, float | str] = {"a plain gradient": plain.median}
    row = Row(claim, figure, "exponent", figure.median, peers, "", at_most=LIMIT)
    measure.report("gradient_moments_growth", [row], milliseconds=measure.milliseconds(found))


if __name__ == "__main__":
    main()
