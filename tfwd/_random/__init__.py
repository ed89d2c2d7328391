"""Random numbers that depend on a seed alone: seeds, masks and noise."""
