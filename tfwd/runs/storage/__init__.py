"""Files of a run on disk: checkpoints, weights, metrics and reports."""
