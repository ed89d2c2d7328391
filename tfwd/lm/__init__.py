"""The language model: an AWD-LSTM trained with dropped weights on real text.

This package is an application of the library: it stands on ``tfwd.layers`` and nothing in the
library stands on it. The files follow the way of the data: ``text`` (reading and tokens),
``vocabulary`` (tokens and numbers), ``stream`` (columns and windows), ``config``, ``model``,
``loop``, ``state``, ``report``; and the programs ``train``, ``tune`` (with ``sweeps``),
``evaluate`` and ``generate``, which share their start-up in ``app``. Nothing is imported here, so
that a program can set up logging before TensorFlow is loaded.
"""
