"""`SingleParametrization`: base class of wrappers that apply one parametrization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfwd.layers._substitution import weight_selection
from tfwd.layers.parametrized import Parametrized
from tfwd.parametrizations import Parametrization


class SingleParametrization(Parametrized):
    """A wrapper that applies one parametrization to all selected weights.

    A subclass makes the parametrization from its own arguments. Its config has these arguments in
    place of `parametrizations`.

    Args:
        layer: Any Keras layer or model.
        parametrization: Parametrization of the selected weights.
        weights: str or list of str. Patterns of weights, or None for the default weights.
        seed, recompute, share_across_replicas, exclude, **kwargs: As in `Parametrized`.

    Raises:
        ValueError: As `Parametrized`.
    """

    def __init__(
        self,
        layer: keras.Layer,
        parametrization: Parametrization,
        weights: str | Sequence[str] | None,
        seed: int | None,
        recompute: bool,
        share_across_replicas: bool,
        exclude: str | Sequence[str] | None,
        **kwargs: Any,
    ) -> None:
        chosen = weight_selection.assign_to_patterns(layer, parametrization, weights)
        super().__init__(layer, chosen, seed, recompute, share_across_replicas, exclude, **kwargs)
        self.parametrization: Any = parametrization

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["parametrizations"]
        return {**config, **self.parametrization.get_config(), "weights": self.weight_patterns}
