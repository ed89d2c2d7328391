"""The training loop, its display, and its reaction to signals and bad steps."""
