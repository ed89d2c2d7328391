"""A sweep over weight dropout alone, from none to 0.7, each value once.

    tfwd-tune --config=configs/wikitext2_small.py --config.data.path=FOLDER \
        --sweep=configs/sweeps/weight_dropout.py --workdir=runs/weight_dropout
"""

from tfwd.lm.sweeps import Float, Sweep


def get_sweep():
    return Sweep({"model.weight_dropout": Float(0, 0.7, step=0.1)}, method="grid")
