"""Sweeps over dropout and noise rates of a Keras model, with keras-tuner.

    from tfwd import tuning

    hypermodel = tuning.rates(
        make_model, dropout={"recurrent_kernel": tuning.Float(0, 0.7, step=0.1)}
    )
    tuner = tuning.tuner(hypermodel, "val_loss", max_trials=8, directory="runs/rates")
    tuner.search(x, y, validation_data=(x_valid, y_valid), epochs=5)

keras-tuner does the search, the bookkeeping and the distribution. This package declares a space
(`search_space`) and the model (`rates_hypermodel`). It also makes a sweep survive stops, crashes
and lost machines (`fault_tolerant_oracle`, `fault_tolerant_tuner`, `chief_and_workers`). `import
tfwd` does not import this package, because keras-tuner is an extra.
"""

try:
    import keras_tuner  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "keras_tuner":
        raise
    raise ImportError(
        "tfwd.tuning needs keras-tuner: in a checkout of tfwd, pip install '.[tune]'"
    ) from error

from tfwd.tuning.keras_model_tuner import tuner
from tfwd.tuning.rates_hypermodel import rates
from tfwd.tuning.search_space import Boolean, Choice, Float, Int

__all__ = ["Boolean", "Choice", "Float", "Int", "rates", "tuner"]
