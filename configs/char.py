"""A character model with two LSTM layers. The default text comes with Python.

    tfwd-train --config=char --workdir=runs/char
    tfwd-train --config=char --config.data.path=FILE.txt --workdir=runs/plays

A single text file is split by position, with 90 % for training. There are few characters, and each
occurs often. Dropping rows of the embedding, or tying the softmax to the embedding, therefore helps
little. The windows are long, because a character carries less information than a word.
"""

from tfwd.lm.config import default_config


def get_config():
    config = default_config()
    config.data.level = "char"
    config.data.min_count = 1
    config.data.batch_size = 32
    config.data.window = 100
    config.data.eval_window = 200
    config.model.embedding_dim = 64
    config.model.hidden_units = (256, 256)
    config.model.tie_weights = False
    config.model.weight_dropout = 0.3
    config.model.embedding_dropout = 0.0
    config.model.input_dropout = 0.0
    config.model.hidden_dropout = 0.1
    config.model.output_dropout = 0.1
    config.model.activation_regularization = 0.0
    config.model.temporal_activation_regularization = 0.0
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 3e-3
    config.optimizer.clip_norm = 1.0
    config.training.epochs = 20
    config.training.lr_decay_factor = 0.5
    config.training.lr_decay_patience = 1
    config.sample.tokens = 400
    return config
