"""Parts that all training programs share: settings, run folder, training loop and sweeps.

A program subclasses `program.Program` and `training.trainer.Trainer`, and declares its config keys
in a `settings.config.Schema`. This package has:

- `settings`: the command line, `--config` files, keys and their validators;
- `storage`: the run folder with the checkpoints for resuming, the metrics, the learning curves, and
  weights that Keras 2 and Keras 3 can both read;
- `training`: the training step, the loop, the display, the optimizer, and the reaction to signals
  and bad steps;
- `sweeps`: searches over the program's keys.

This file imports nothing, so that a program can set up logging before TensorFlow is loaded.
"""
