from tfwd.lm.config import default_config


def get_config():
    config = default_config()
    config.data.path = "text.txt"
    config.data.batch_size = 4
    config.data.eval_batch_size = 2
    config.data.window = 8
    config.model.embedding_dim = 6
    config.model.hidden_units = (6, 6)
    config.model.variational_noise = 0.01
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 0.01
    config.optimizer.weight_decay = 0.1
    config.training.epochs = 1
    config.training.log_steps = 5
    config.training.tensorboard = False
    config.sample.tokens = 5
    return config
