"""Sweeps over the keys of a program: each trial is a training run with a folder of its own.

The search is keras-tuner's (`tfwd.tuning`). Here are its declaration (`sweep`), its folder, its
trials (`trial`, `tuner`), and what shows them: `board` (the live table), `rows` and `table`,
`report`, `plots`, `hparams`.
"""
