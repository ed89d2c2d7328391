"""Table of every optimizer of keras.optimizers, with arguments that turn off its decay."""

import inspect
from typing import Any

import keras

# Older releases of Keras have no Muon, or a Muon with one decay.
MUON = getattr(keras.optimizers, "Muon", None)
MUON_HAS_TWO_DECAYS = bool(MUON) and "adam_weight_decay" in inspect.signature(MUON).parameters
# Optimizers that decay by default need an argument that turns decay off.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.0},
    "Muon": {"weight_decay": 0.0, "adam_weight_decay": 0.0},
}
WRAPPERS = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
NAMES = sorted(
    name
    for name, found in vars(keras.optimizers).items()
    if inspect.isclass(found)
    and issubclass(found, keras.optimizers.Optimizer)
    and name not in WRAPPERS
    and (name != "Muon" or MUON_HAS_TWO_DECAYS)  # with one decay it does not run on TensorFlow
)
HAS_MULTI = hasattr(keras.optimizers, "MultiOptimizer")


def make(name: str, learning_rate: Any = 0.1, **options: Any) -> keras.optimizers.Optimizer:
    """Returns the optimizer of that name, without decay of its own."""
    arguments = {**ARGUMENTS.get(name, {}), **options}
    if name == "Multi":
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(
                make("SGD", learning_rate), {".*bias": make("Adam", learning_rate)}
            )
        )
    return getattr(keras.optimizers, name)(learning_rate=learning_rate, **arguments)
