"""Sweeps of the language model: what `tfwd-tune` does, and what a sweep file is written with.

    from tfwd.lm.sweeps import Float, Sweep

    def get_sweep():
        return Sweep({"model.weight_dropout": Float(0, 0.7, step=0.1)}, method="grid")

The search is keras-tuner's (`tfwd.tuning`). Here a trial is a training run with a folder of its own
(`trial`), and what is found is shown: `board` (the live table), `report`, `plots`, `hparams`.
"""

from tfwd.lm.sweeps.sweep import Sweep
from tfwd.tuning.space import Boolean, Choice, Float, Int

__all__ = ["Boolean", "Choice", "Float", "Int", "Sweep"]
