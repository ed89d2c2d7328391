"""Keras layers that perturb their weights while they train: imported as ``tfwd.layers``.

- `Parametrized`: any layer, on functions of its weights; `WeightDropout`, `VariationalNoise` and
  `Mixout` are the common ones.
- `WeightDropLSTM`: a `keras.layers.LSTM` with a dropped recurrent kernel.
- `LockedDropout`, `DropoutEmbedding`, `TiedDense`: what else the AWD-LSTM is made of.
- `CheckFinite`: looks for NaN and infinities in what passes it, forward and backward.

The sources stand in ``layers/`` at the top of the repository and are installed under this name.
"""

# A second copy of a module under another name would silently overwrite the first one's entries
# in Keras's serialization registry, and saved models would then load the wrong classes.
if __name__ != "tfwd.layers":
    raise ImportError(
        f"this package is installed as tfwd.layers and cannot be imported as {__name__!r}: "
        "write `from tfwd import layers` (in a checkout, after `pip install -e .`)"
    )

from tfwd.layers.check_finite import CheckFinite
from tfwd.layers.dropout_embedding import DropoutEmbedding
from tfwd.layers.locked_dropout import LockedDropout
from tfwd.layers.mixout import Mixout
from tfwd.layers.parametrized import Parametrized
from tfwd.layers.tied_dense import TiedDense
from tfwd.layers.variational_noise import VariationalNoise
from tfwd.layers.weight_drop_lstm import WeightDropLSTM
from tfwd.layers.weight_dropout import WeightDropout

__all__ = [
    "CheckFinite",
    "DropoutEmbedding",
    "LockedDropout",
    "Mixout",
    "Parametrized",
    "TiedDense",
    "VariationalNoise",
    "WeightDropLSTM",
    "WeightDropout",
]
