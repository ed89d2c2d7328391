"""One row for each parametrization, or for each option that changes what it computes."""

from tfwd import parametrizations as P

# Those whose gradient is not the derivative of their formula, such as straight-through rounding: it
# is held against finite differences for the others alone, and has a test of its own.
SURROGATE: list[P.Parametrization] = [P.GaussianNoise(0.3, scale="deviation")]
ALL = [
    P.Dropout(0.5),
    P.Dropout(0.25, noise_shape=(None, 1)),
    P.GaussianNoise(0.3),
    P.GaussianNoise(0.3, start_step=2),
    P.WeightNorm(),
    P.WeightNorm(axis=0, epsilon=1e-3),
    P.Chain([P.GaussianNoise(0.3), P.Dropout(0.5)]),
    P.Chain([P.Chain([P.Dropout(0.5)]), P.WeightNorm()]),
    *SURROGATE,
]
