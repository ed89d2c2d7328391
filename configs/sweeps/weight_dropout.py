"""Sweeps weight dropout alone from 0 to 0.7, each value once.

    tfwd-tune --config=wikitext2_small --config.data.path=FOLDER \
        --sweep=weight_dropout --workdir=runs/weight_dropout
"""

from tfwd.lm.sweeps import Float, Sweep


def get_sweep():
    return Sweep({"model.weight_dropout": Float(0, 0.7, step=0.1)}, method="grid")
