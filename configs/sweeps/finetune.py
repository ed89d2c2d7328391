"""Sweeps the learning rate and the layer-wise decay of fine-tuning.

tfwd-tune --program=finetune --config=finetune --sweep=finetune \
  --workdir=runs/finetune-rates
"""

from tfwd.runs.sweeps.sweep import Sweep
from tfwd.tuning import Choice


def get_sweep():
    return Sweep(
        {
            "optimizer.learning_rate": Choice([1e-4, 2e-4, 4e-4]),
            "optimizer.layer_decay": Choice([0.8, 1.0]),
        },
        method="grid",
    )
