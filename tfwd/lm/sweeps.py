"""`Sweep`, `Float`, `Int`, `Choice` and `Boolean`: everything that a sweep file imports.

from tfwd.lm.sweeps import Float, Sweep

def get_sweep():
    return Sweep({"model.weight_dropout": Float(0, 0.7, step=0.1)}, method="grid")
"""

from tfwd.runs.sweeps.sweep import Sweep
from tfwd.tuning.search_space import Boolean, Choice, Float, Int

__all__ = ["Boolean", "Choice", "Float", "Int", "Sweep"]
