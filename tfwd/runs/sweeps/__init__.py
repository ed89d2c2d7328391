"""Sweeps over config keys of a program, in which each trial is a run with its own folder.

keras-tuner searches (`tfwd.tuning`). `sweep` declares the search. `folder` has the files. `tune` is
the program, `tuner` and `trial` run the trials. `live_table` shows them, `rows` makes their table,
and `report`, `plots` and `hparams` write the results.
"""
