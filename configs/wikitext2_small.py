"""Two LSTM layers of 300 and 150 units on a small word-level text, such as a part of WikiText-2.

    tfwd-train --config=wikitext2_small --config.data.path=FOLDER --workdir=runs/small

FOLDER has train.txt, valid.txt and test.txt with a few hundred thousand words in total. A model of
this size overfits on so little text, so it needs dropout. Weight dropout is as in the AWD-LSTM
paper. The other dropout rates are lower, and the embedding has no dropout. To see the effect of a
dropout rate, set it to 0: `--config.model.weight_dropout=0`.
"""

from tfwd.lm.config import default_config


def get_config():
    config = default_config()
    config.data.min_count = 5  # a model cannot learn rarer words from so little text
    config.data.batch_size = 32
    config.data.window = 35
    config.model.embedding_dim = 150
    config.model.hidden_units = (300, 150)
    config.model.weight_dropout = 0.5
    config.model.embedding_dropout = 0.0
    config.model.input_dropout = 0.2
    config.model.hidden_dropout = 0.1
    config.model.output_dropout = 0.2
    config.model.activation_regularization = 2.0
    config.model.temporal_activation_regularization = 1.0
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 3e-3
    config.optimizer.clip_norm = 0.25
    config.training.epochs = 12
    config.training.lr_decay_factor = 0.4
    config.training.lr_decay_patience = 1
    return config
