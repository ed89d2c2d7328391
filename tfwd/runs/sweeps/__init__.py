"""Sweeps over config keys of a program, in which each trial is a run with its own folder.

keras-tuner searches (`tfwd.tuning`). `sweep` declares the search. `sweep_folder` has the files.
`tune_command` is the program, `tuner` and `trial_run` run the trials. `live_table` shows them,
`trial_rows` makes their table. `report`, `score_plot` and `tensorboard_hparams` write the results.
"""
