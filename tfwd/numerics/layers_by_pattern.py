"""Selects layers and weights of a model by regular expressions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tfwd import _keras, path_patterns


class Patterns:
    """Selection of layers and weights by regular expressions.

    Args:
        who: str. The name at the beginning of each error message.
        include: regular expression, or a list of them, of the selected layers and weights. A
            pattern must match the full path or its last components. Default None, for all.
        exclude: the same, for layers and weights that are not selected. It has priority over
            `include`. Default None.

    Raises:
        ValueError: If a pattern is not a regular expression.
    """

    def __init__(
        self,
        who: str,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
    ):
        given = {"include": include, "exclude": exclude}
        self._who = who
        self._expressions = {
            what: [
                path_patterns.compiled(pattern, f"{who}: {what}={pattern!r}")
                for pattern in ([patterns] if isinstance(patterns, str) else patterns)
            ]
            for what, patterns in given.items()
            if patterns is not None
        }

    def check(self, model: Any, *others: str) -> None:
        """Raises a ValueError if a pattern matches no layer, no weight and none of `others`."""
        weights = [_keras.variables.path(variable) for variable in _keras.variables.weights(model)]
        known = [*(path for path, _ in _layers(model)), *weights]
        each = [(what, one) for what, some in self._expressions.items() for one in some]
        for what, expression in each:
            if not any(path_patterns.matches(expression, path) for path in (*known, *others)):
                raise ValueError(
                    f"{self._who}: {what}={expression.pattern!r} matches no layer and no weight of "
                    f"model '{model.name}'. Use a path of this model: {', '.join(known[:12])}"
                    f"{' and others' if len(known) > 12 else ''}"
                )

    def left_out_weights(self, model: Any) -> frozenset[str]:
        """Returns the paths of the weights that are not selected, or whose layer is not selected.

        The path of a weight need not contain the names of all layers around it.
        """
        layers = [layer for path, layer in _layers(model) if not self.choose(path)]
        paths = [_keras.variables.path(v) for v in _keras.variables.weights(model)]
        inside = [
            _keras.variables.path(v) for layer in layers for v in _keras.variables.weights(layer)
        ]
        return frozenset([*inside, *(path for path in paths if not self.choose(path))])

    def choose(self, name: str) -> bool:
        """Returns True if a layer or a weight is selected."""
        fits = {
            what: any(path_patterns.matches(one, name) for one in some)
            for what, some in self._expressions.items()
        }
        return fits.get("include", True) and not fits.get("exclude", False)


def _layers(layer: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the paths of the layers inside a layer, each with its layer."""
    for inner in _keras.layers.sublayers(layer):
        yield path + inner.name, inner
        yield from _layers(inner, f"{path}{inner.name}/")
