"""Sweeps all dropout rates and the noise of the language model with Hyperband.

    tfwd-tune --config=quickstart --sweep=rates --workdir=runs/rates

Most trials are short. With the 12 epochs of the quickstart there are 30 trials and 136 epochs in
total (see --dry_run).
"""

from tfwd.lm.sweeps import Float, Sweep


def get_sweep():
    return Sweep(
        {
            "model.weight_dropout": Float(0, 0.7, step=0.1),
            "model.variational_noise": Float(0, 0.1, step=0.025),
            "model.embedding_dropout": Float(0, 0.3, step=0.05),
            "model.input_dropout": Float(0, 0.6, step=0.1),
            "model.hidden_dropout": Float(0, 0.5, step=0.1),
        },
        method="hyperband",
    )
