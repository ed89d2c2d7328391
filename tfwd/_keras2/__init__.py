"""Keras 2.15 beyond its public API: what `tfwd._keras3` holds of Keras 3, under the same names."""
