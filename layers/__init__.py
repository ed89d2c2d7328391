"""Keras layers that perturb their weights during training, imported as ``tfwd.layers``.

- `Parametrized`: any layer, computed with functions of its weights. `WeightDropout`, `Mixout` and
  `VariationalNoise` are common special cases.
- `WeightDropLSTM`: a `keras.layers.LSTM` with dropout on its recurrent kernel.
- `LockedDropout`, `DropoutEmbedding`, `TiedDense`: the other layers of the AWD-LSTM.
- `CheckFinite`: checks its input, and the gradient, for NaN and infinities.

The sources are in ``layers/`` at the top of the repository and are installed under this name.
"""

# If the module were imported a second time under another name, the copy would overwrite the entries
# in Keras's serialization registry. Saved models would then load the wrong classes.
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
