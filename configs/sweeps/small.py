"""Sweeps two dropout rates in six trials of two epochs. `make sweep` runs it.

    tfwd-tune --config=quickstart --config.training.epochs=2 \
        --sweep=small --workdir=runs/sweep

It takes about three minutes on two cores.
"""

from tfwd.lm.sweeps import Float, Sweep


def get_sweep():
    return Sweep(
        {
            "model.weight_dropout": Float(0, 0.6, step=0.1),
            "model.input_dropout": Float(0, 0.6, step=0.1),
        },
        max_trials=6,
    )
