"""The AWD-LSTM of Merity, Keskar and Socher (2017) for the Penn Treebank, with published values.

    tfwd-train --config=awd_lstm_ptb --config.data.path=FOLDER --workdir=runs/ptb

FOLDER has the Penn Treebank in Mikolov's preparation: train.txt, valid.txt and test.txt, or
ptb.train.txt and so on. The vocabulary has 10,000 words. Rare words are already replaced.

Published perplexities, which tfwd has not reproduced:
- The paper, with averaged SGD and fine-tuning: 60.0 validation, 57.3 test.
- The authors' program (github.com/salesforce/awd-lstm-lm) with the values below, with averaged
  SGD and without fine-tuning: about 61.2 validation, 58.8 test.

The values come from the authors' command for this text (`--batch_size 20 --dropouti 0.4
--dropouth 0.25 --epoch 500`) and from the defaults of their program, including averaged SGD. tfwd
differs from their program in three points:
- An LSTM of tfwd has one bias. Their program adds two biases.
- tfwd skips blank lines. Their program predicts an end of line for each blank line.
- The average of tfwd includes all weights since averaging started, also the first weights.

The run takes days on CPUs. It is meant for a GPU.

Reference: "Regularizing and Optimizing LSTM Language Models", arXiv:1708.02182.
"""

from tfwd.lm.config import default_config


def get_config():
    config = default_config()
    config.data.min_count = 1
    config.data.batch_size = 20
    config.data.eval_batch_size = 10
    config.data.window = 70
    config.data.random_windows = True
    config.model.embedding_dim = 400
    config.model.hidden_units = (1150, 1150, 400)
    config.model.tie_weights = True
    config.model.weight_dropout = 0.5
    config.model.embedding_dropout = 0.1
    config.model.input_dropout = 0.4
    config.model.hidden_dropout = 0.25
    config.model.output_dropout = 0.4
    config.model.activation_regularization = 2.0
    config.model.temporal_activation_regularization = 1.0
    config.model.init_scale = 0.1
    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 30.0
    config.optimizer.weight_decay = 1.2e-6
    config.optimizer.non_monotone_interval = 5
    config.optimizer.clip_norm = 0.25
    config.optimizer.scale_lr_by_window = True
    config.training.epochs = 500
    config.training.checkpoint_seconds = 600.0
    return config
