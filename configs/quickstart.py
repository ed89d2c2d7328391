"""A small AWD-LSTM on the text that comes with Python. `make train` runs it.

    tfwd-train --config=quickstart --workdir=runs/quickstart

The text is the topics of Python's reference manual (about 65,000 words). It comes with every
Python, so nothing is downloaded. The run should end within three minutes on two cores. The text is
short, and half of it is code. The perplexity therefore shows that the program works. It shows
nothing about the method.
"""

from tfwd.lm.config import default_config


def get_config():
    config = default_config()
    config.data.min_count = 2
    config.data.batch_size = 32
    config.data.window = 35
    config.model.embedding_dim = 128
    config.model.hidden_units = (256, 128)
    config.model.weight_dropout = 0.5
    config.model.embedding_dropout = 0.05
    config.model.input_dropout = 0.3
    config.model.hidden_dropout = 0.2
    config.model.output_dropout = 0.3
    config.model.activation_regularization = 1.0
    config.model.temporal_activation_regularization = 0.5
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 3e-3
    config.optimizer.clip_norm = 0.5
    config.training.epochs = 12
    config.training.lr_decay_factor = 0.5
    config.training.lr_decay_patience = 1
    return config
