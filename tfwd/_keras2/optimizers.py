"""Optimizers inside optimizers, on Keras 2.15."""
