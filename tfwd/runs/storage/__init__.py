"""A run's folder: checkpoints, weights, metrics, reports and texts on disk."""
