"""Random numbers that depend only on a seed: seeds, masks and noise."""
