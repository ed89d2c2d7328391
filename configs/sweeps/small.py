"""A sweep of six trials of two epochs: `make sweep`, about three minutes on two cores.

    tfwd-tune --config=configs/quickstart.py --config.training.epochs=2 \
        --sweep=configs/sweeps/small.py --workdir=runs/sweep
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
