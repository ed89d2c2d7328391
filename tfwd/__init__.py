"""Weight dropout and variational noise for TensorFlow 2 and Keras, and related tools.

    import tfwd
    from tfwd import layers, parametrizations as P

    model = tfwd.parametrize(model, {"recurrent_kernel": P.Dropout(0.5)})

`tfwd.layers` has the Keras layers. `tfwd.parametrizations` has the functions that compute a layer's
effective weights from its raw weights. `tfwd.predict_samples` predicts with many draws of weights.
`tfwd.gradients` computes moments of per-example gradients. `tfwd.distribute` trains on several
machines.
`tfwd.pretrained` loads weights of published models. `tfwd.lm` is the language model.
"""

from pathlib import Path

__version__ = "0.1.0"  # setup.py reads this line

try:
    import tensorflow  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise ImportError(
        "tfwd needs TensorFlow, which is not installed. tfwd does not install it, because it has "
        "two builds: run pip install tensorflow, or pip install tensorflow-cpu for the smaller "
        "build without GPU support"
    ) from error

# In a checkout, the folders layers, optimizers and configs are beside this folder, not inside. If
# Python starts at the top of a checkout, it imports this folder instead of an installed tfwd.
if not (Path(__file__).parent / "layers").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

from tfwd import (
    callbacks,
    distribute,
    gradients,
    layers,
    metrics,
    numerics,
    optimizers,
    parametrizations,
    pretrained,
)
from tfwd._graph.custom_gradient import release_models
from tfwd.dropout_moment_matching import moment_matching
from tfwd.in_place import added_parametrizations
from tfwd.in_place_state_file import load_state, save_state
from tfwd.layers import transformer  # noqa: F401, registers its classes with Keras
from tfwd.layers._substitution.reference_weights import reset_references
from tfwd.monte_carlo import predict_samples
from tfwd.parametrized_model import parametrize, unwrap

__all__ = [
    "__version__",
    "added_parametrizations",
    "callbacks",
    "distribute",
    "gradients",
    "layers",
    "load_state",
    "metrics",
    "moment_matching",
    "numerics",
    "optimizers",
    "parametrizations",
    "parametrize",
    "predict_samples",
    "pretrained",
    "release_models",
    "reset_references",
    "save_state",
    "unwrap",
]
