"""The AWD-LSTM of Merity, Keskar and Socher (2017) for WikiText-2, with published values.

    tfwd-train --config=awd_lstm_wikitext2 --config.data.path=FOLDER --workdir=runs/wt2

FOLDER has WikiText-2: wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens. The vocabulary has
33,278 words. Rare words are already replaced.

Published perplexities, which tfwd has not reproduced:
- The paper, with averaged SGD and fine-tuning: 68.6 validation, 65.8 test.
- The authors' program (github.com/salesforce/awd-lstm-lm) with the values below, with averaged
  SGD and without fine-tuning: about 68.7 validation, 65.6 test.

The values come from the authors' command for this text (`--epochs 750 --dropouth 0.2`) and from the
defaults of their program, including averaged SGD. tfwd differs from their program in three points:
- An LSTM of tfwd has one bias. Their program adds two biases.
- tfwd skips blank lines. Their program predicts an end of line for each blank line.
- The average of tfwd includes all weights since averaging started, also the first weights.

The run takes weeks on CPUs. It is meant for a GPU.

Reference: "Regularizing and Optimizing LSTM Language Models", arXiv:1708.02182.
"""

from tfwd.lm.config import default_config


def get_config():
    config = default_config()
    config.data.min_count = 1
    config.data.batch_size = 80
    config.data.eval_batch_size = 10
    config.data.window = 70
    config.data.random_windows = True
    config.model.embedding_dim = 400
    config.model.hidden_units = (1150, 1150, 400)
    config.model.tie_weights = True
    config.model.weight_dropout = 0.5
    config.model.embedding_dropout = 0.1
    config.model.input_dropout = 0.65
    config.model.hidden_dropout = 0.2
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
    config.training.epochs = 750
    config.training.checkpoint_seconds = 600.0
    return config
