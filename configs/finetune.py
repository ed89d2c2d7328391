"""A small BERT that learns which area of Python's library a docstring is of: `make finetune`.

    tfwd-finetune --config=configs/finetune.py --workdir=runs/finetune

Texts: docstrings of the standard library (877 to train on, in every Python), of six areas, so
nothing is downloaded. The pretrained encoder is MiniLM (Wang et al., 2020; 6 layers of width 384)
as trained for sentences. `make finetune` sets it up in .venv/minilm. The run takes less than five
minutes on two cores.
"""

from tfwd.finetune.config import default_config


def get_config():
    config = default_config()
    config.model.pretrained = ".venv/minilm"
    config.model.pooling = "mean"
    config.data.max_length = 64
    config.data.batch_size = 16
    config.optimizer.learning_rate = 2e-4
    config.optimizer.layer_decay = 0.9
    config.optimizer.weight_decay = 0.01
    config.optimizer.decay_include = ".*kernel"
    config.optimizer.warmup = 0.1
    config.training.epochs = 3
    return config
