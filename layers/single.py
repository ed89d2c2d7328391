"""The common part of wrappers that put one parametrization on the weights of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfwd.layers import weight_selection
from tfwd.layers.parametrized import Parametrized
from tfwd.layers.weight_perturbation import TargetedWeights
from tfwd.parametrizations import Parametrization


class SingleParametrization(Parametrized):
    """`Parametrized` with one parametrization, on named weights or on the default ones."""

    def _init_single(
        self,
        layer: keras.Layer,
        parametrization: Parametrization,
        weights: str | Sequence[str] | None,
        seed: int | None,
        recompute: bool,
        share_across_replicas: bool,
        kwargs: dict[str, Any],
    ) -> None:
        self._setup(layer, seed, recompute, share_across_replicas, kwargs)
        # `weights` itself is what Keras calls the list of a layer's variables.
        names = (weights,) if isinstance(weights, str) else weights
        self.weight_patterns = None if names is None else tuple(names)
        self.parametrization: Any = parametrization
        if names is not None and not self.weight_patterns:
            raise ValueError(f"layer '{layer.name}': weights is empty; None means the default ones")
        self._check_early()

    def _patterns(self) -> dict[str, Parametrization]:
        if self.weight_patterns is not None:
            return dict.fromkeys(self.weight_patterns, self.parametrization)
        recurrent = isinstance(self.layer, (keras.layers.RNN, keras.layers.Bidirectional))
        return {"recurrent_kernel" if recurrent else "kernel": self.parametrization}

    def _select(self) -> TargetedWeights:
        found = weight_selection.targets(self.layer, self.weight_patterns)
        return [(target, self.parametrization) for target in found]

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["parametrizations"]
        patterns = self.weight_patterns
        weights = None if patterns is None else list(patterns)
        return {**config, **self.parametrization.get_config(), "weights": weights}
