"""Language model: an AWD-LSTM that is trained on real text with weight dropout.

This package is an application. It uses ``tfwd.layers`` and ``tfwd.runs``, and the library does not
use it. ``data`` reads text, numbers its tokens and cuts windows. ``config``, ``model``, ``losses``,
``training_step`` and ``trainer`` define the training. ``final_report`` writes the report.
``program`` combines these for ``tfwd.runs``. ``commands`` has the console scripts. This file
imports nothing, so that a program can set up logging before TensorFlow is loaded.
"""
