"""Training runs: what the programs share, whatever they train.

A program subclasses `program.Program` and `trainer.Trainer`, and has a table of keys
(`config.Schema`). It gets from here:

- the command line and `--config` (`app`, `command_line`, `config`, `keys`, `validators`);
- a run's folder with checkpoints, by which a run that was stopped goes on (`folder`, `claim`,
  `checkpoint`, `state`, `signals`), and weights that either Keras reads (`weights`, `saved`);
- the training loop, what it shows and what it writes (`train`, `trainer`, `optimizer`, `display`,
  `throughput`, `metrics`, `report`);
- sweeps over its keys (`tune`, `sweeps`).

Nothing is imported here, so that a program can set up logging before TensorFlow is loaded.
"""
