"""Monte Carlo predictions: the distribution of a model's outputs under draws of its weights."""

from tfwd.monte_carlo.prediction import PredictedSamples, predict_samples

__all__ = ["PredictedSamples", "predict_samples"]
