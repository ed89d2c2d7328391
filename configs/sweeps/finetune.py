"""A sweep over the learning rate of a fine-tuning and its decay by layers.

tfwd-tune --program=finetune --config=configs/finetune.py --sweep=configs/sweeps/finetune.py \
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
