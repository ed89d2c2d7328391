"""Cases of finite_check_cost.py: sizes, names and data of its five models, and names of its sides.

It imports no library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

MLP, CONVOLUTIONS, LSTM, BLOCK = "MLP", "convolutions", "LSTM", "transformer block"
STACK = "stack"  # many small layers, which show the cost of a check per tensor
# Shapes of the inputs; the first axis is the batch.
SHAPES = {
    MLP: (128, 512),
    CONVOLUTIONS: (32, 32, 32, 3),
    LSTM: (32, 35, 200),
    BLOCK: (8, 64, 256),
    STACK: (32, 64),
}
DEPTH, STACK_DEPTH = 8, 100
FILTERS, UNITS, HEADS, WIDE = (32, 64), 200, 4, 1024
CLASSES = 10
# So small that no model diverges or converges during a measurement.
LEARNING_RATE = 1e-7

BARE = "bare"
OURS, OPTIMIZER, TENSORFLOW = "FiniteCheck", "ApplyIfFinite", "enable_check_numerics"
EVERY = "FiniteCheck(every_n_steps=10)"
ANOMALY, UNDERFLOW = "detect_anomaly", "DebugUnderflowOverflow"


class Side(NamedTuple):
    """One way to train a model.

    Attributes:
        step: Function that makes `steps(name)` steps, waits for them, and returns the last loss.
        react_to_nan: Function that sets an element of the last layer's kernel to NaN, makes a step,
            and returns the outcome in words. An earlier layer is not suitable, because its `relu`
            converts NaN to 0 in some graphs.
    """

    step: Callable[[], float]
    react_to_nan: Callable[[], str]


def depth(name: str) -> int:
    """Returns the number of hidden layers of a model that has only Dense layers."""
    return STACK_DEPTH if name == STACK else DEPTH


def steps(name: str) -> int:
    """Returns the number of training steps that are timed together."""
    return 10 if name == STACK else 1


def title(name: str) -> str:
    """Returns a model's name for the tables."""
    batch, *shape = SHAPES[name]
    return {
        MLP: f"{DEPTH} Dense {shape[0]}, batch {batch}",
        CONVOLUTIONS: f"{len(FILTERS)} Conv2D with BatchNormalization, batch {batch}",
        LSTM: f"LSTM {UNITS}, batch {batch}, {shape[0]} steps",
        STACK: f"{STACK_DEPTH} Dense {shape[0]}, batch {batch}, ten steps",
        BLOCK: f"transformer block of {shape[-1]}, batch {batch}, {shape[0]} steps",
    }[name]


def data(name: str, batch: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and labels, the same in each call. `batch` replaces the usual batch size."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (batch or SHAPES[name][0], *SHAPES[name][1:])
    return rng.normal(size=shape).astype("float32"), rng.integers(0, CLASSES, shape[0])
