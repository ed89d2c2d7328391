"""Keras optimizers, and wrappers around Keras optimizers. Imported as ``tfwd.optimizers``.

- `DecoupledWeightDecay`: weight decay that is not part of the gradient, for any optimizer.
- `NonMonotonicASGD`: averages the weights from the moment when training stalls. `fit` needs
  `NonMonotonicASGDCallback`.
- `ApplyIfFinite`: skips steps whose gradients or learning rate are not finite.
- `addons`: `AdamW`, `SGDW` and `extend_with_decoupled_weight_decay` with the arguments of
  tensorflow-addons.

The sources are in ``optimizers/`` at the top of the repository and are installed under this name.
"""

# If the module were imported a second time under another name, the copy would overwrite the entries
# in Keras's serialization registry. Saved models would then load the wrong classes.
if __name__ != "tfwd.optimizers":
    raise ImportError(
        f"this package is installed as tfwd.optimizers and cannot be imported as {__name__!r}: "
        "write `from tfwd import optimizers` (in a checkout, after `pip install -e .`)"
    )

from tfwd.optimizers import addons
from tfwd.optimizers.apply_if_finite import ApplyIfFinite
from tfwd.optimizers.asgd_callback import NonMonotonicASGDCallback
from tfwd.optimizers.decoupled_weight_decay import DecoupledWeightDecay
from tfwd.optimizers.non_monotonic_asgd import NonMonotonicASGD

__all__ = [
    "ApplyIfFinite",
    "DecoupledWeightDecay",
    "NonMonotonicASGD",
    "NonMonotonicASGDCallback",
    "addons",
]
