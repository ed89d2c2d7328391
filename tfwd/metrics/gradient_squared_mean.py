"""`GradientSquaredMean`: a Keras metric of the mean of squared per-example gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras, dtypes
from tfwd.gradients import Moments


@keras.saving.register_keras_serializable("tfwd")
class GradientSquaredMean(keras.metrics.Metric):
    """Keras metric: the mean of squared per-example gradients over all weights and steps.

    Formula: `sum_t B_t mean_i(s_ti) / sum_t B_t`. `s_t` is the `mean_square` of step `t`, and
    `B_t` is its batch size, so every example counts once.

    Args:
        variables: list. The weights, in the order of the moments. Each is a Keras variable, as in
            `model.trainable_variables`, or a pair of a path and a number of entries.
        name, dtype: As for any metric. The sums are stored in float32, or in `dtype` if it is
            wider.

    Raises:
        ValueError: If there are no variables.

    Example:
        >>> import keras, tensorflow as tf
        >>> from tfwd import gradients, metrics
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        >>> model.set_weights([tf.ones([2, 1])])
        >>> metric = metrics.GradientSquaredMean(model.trainable_variables)
        >>> x, y = tf.constant([[1.0, 0.0], [1.0, 2.0]]), tf.constant([[0.0], [2.0]])
        >>> metric.update_state(gradients.moments(model, x, y, "mse"))
        >>> float(metric.result())  # mean of 4 and 8
        6.0
        >>> [float(value) for value in metric.by_variable().values()]  # by their paths
        [6.0]
    """

    def __init__(
        self,
        variables: Sequence[Any],
        name: str = "gradient_squared_mean",
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.paths, self.sizes = [], []
        for variable in variables:
            if _keras.variables.is_variable(variable):
                size = tf.TensorShape(variable.shape).num_elements()
                variable = (_keras.variables.path(variable), size)
            path, size = variable
            self.paths.append(str(path))
            self.sizes.append(int(size))
        if not self.paths:
            raise ValueError(
                "GradientSquaredMean: variables is empty: pass model.trainable_variables"
            )
        stored = dtypes.wide(tf.as_dtype(self.dtype)).name
        self.total = self.add_weight(
            name="total", shape=(len(self.paths),), initializer="zeros", dtype=stored
        )
        self.examples = self.add_weight(
            name="examples", shape=(), initializer="zeros", dtype=stored
        )

    def reset_state(self) -> None:
        """Resets the metric."""
        for variable in (self.total, self.examples):
            variable.assign(tf.zeros(variable.shape, variable.dtype))

    def update_state(self, moments: Moments, *args: Any, **kwargs: Any) -> None:
        """Adds the moments of a step: `update_state(moments, sample_weight=None)`.

        Args:
            moments: Result of `tfwd.gradients.moments`.
            *args, **kwargs: `sample_weight`: float. A factor. The weight of the step is
                `sample_weight * batch_size`. Default None, for 1.

        Raises:
            ValueError: If `moments` has another type, or belongs to other weights.
        """
        # A model that was compiled with this metric would pass targets, outputs and weights.
        if not isinstance(moments, Moments):
            raise ValueError(
                f"metric '{self.name}' expects the result of tfwd.gradients.moments, got "
                f"{type(moments).__name__}. It cannot be used in compile(metrics=[...]): to "
                "measure in fit, remove it from compile and use "
                "fit(callbacks=[tfwd.callbacks.GradientSquaredMean()])"
            )
        self._add(moments, *args, **kwargs)

    def _add(self, moments: Moments, sample_weight: Any = None) -> None:
        shapes = [tuple(squares.shape) for squares in moments.mean_square]
        sizes = [tf.TensorShape(shape).num_elements() for shape in shapes]
        if sizes != self.sizes:
            raise ValueError(
                f"metric '{self.name}' was made for {len(self.sizes)} weights with {self.sizes} "
                f"entries, got moments of {len(sizes)} weights with the shapes {shapes}: pass the "
                "moments of the same weights"
            )
        dtype = self.total.dtype  # may be wider than the metric's dtype
        means = [tf.reduce_mean(tf.cast(s, dtype)) for s in moments.mean_square]
        weight = tf.cast(moments.batch_size, dtype)
        if sample_weight is not None:
            weight = weight * tf.cast(sample_weight, dtype)
        self.total.assign_add(weight * tf.stack(means))
        self.examples.assign_add(weight)

    def result(self) -> tf.Tensor:
        """Returns the mean over the entries of all weights."""
        return tf.reduce_sum(self._means() * self.sizes) / float(sum(self.sizes))

    def by_variable(self) -> dict[str, tf.Tensor]:
        """Returns the mean over the entries of each weight, by the weight's path."""
        return dict(zip(self.paths, tf.unstack(self._means()), strict=True))

    def _means(self) -> tf.Tensor:
        total = tf.convert_to_tensor(self.total)
        return tf.math.divide_no_nan(total, tf.convert_to_tensor(self.examples))

    def get_config(self) -> dict[str, Any]:
        variables = [list(pair) for pair in zip(self.paths, self.sizes, strict=True)]
        return {"variables": variables, "name": self.name, "dtype": self.dtype}
