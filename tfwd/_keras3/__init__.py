"""Keras 3 beyond its public API: for layers, for their calls, for optimizers and their updates."""
