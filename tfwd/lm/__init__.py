"""The language model: an AWD-LSTM trained with dropped weights on real text.

This package is an application of the library: it stands on ``tfwd.layers`` and ``tfwd.runs``, and
nothing in the library stands on it. The files follow the way of the data: ``text`` (reading and
tokens), ``vocabulary`` (tokens and numbers), ``stream`` (columns and windows), ``config``,
``model``, ``losses``, ``step``, ``trainer``, ``finish`` (the report). ``program`` is what it gives
to ``tfwd.runs``; ``train``, ``tune``, ``evaluate`` and ``generate`` are the console scripts.
Nothing is imported here, so that a program can set up logging before TensorFlow is loaded.
"""
