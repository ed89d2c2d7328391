"""Helpers that several benchmarks share: timing, memory, plots, models."""
