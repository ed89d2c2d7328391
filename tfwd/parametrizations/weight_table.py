"""`table`: shows which weights of a model are parametrized, and how."""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras, parametrization_rates
from tfwd.parametrizations.base import Parametrization
from tfwd.parametrizations.parametrized_layers import parametrized_layers

WIDTH = 100  # characters in a line
GAP = "  "


class WeightRow(NamedTuple):
    """A row of the table.

    Attributes:
        pattern: Pattern that selected the weight, or None for a default weight.
        weight: Name of the weight, as in `effective_weights`.
        shape: Shape of the weight.
        parametrization: Text of the parametrization, with the current value of a schedule.
        layer: Path of the layer that parametrizes the weight: the names of the outer layers and the
            layer's own name, joined by `/`.
        calls: Number of the layer's training calls so far.
    """

    pattern: str | None
    weight: str
    shape: tuple[int, ...]
    parametrization: str
    layer: str
    calls: int


class WeightTable(list):
    """A list of rows, one per parametrized weight. `str` and `print` show it as a table."""

    def __init__(self, rows: Any, model: str) -> None:
        super().__init__(rows)
        self._model = model

    def __str__(self) -> str:
        if not self:
            return f"'{self._model}' has no parametrized weights"
        head = ("pattern", "weight", "shape", "parametrization", "layer", "calls")
        lines = [head, *(_cells(row) for row in self)]
        columns = list(zip(*lines, strict=True))
        natural = [max(map(len, column)) for column in columns]
        # Wrapped lines may be shorter than their column. The other columns get the unused width.
        used = [
            max(len(text) for cell in column for text in _wrapped(cell, width))
            for column, width in zip(columns, _widths(natural), strict=True)
        ]
        widths = _widths(
            [
                own if width == taken else taken
                for own, width, taken in zip(natural, _widths(natural), used, strict=True)
            ]
        )
        return "\n".join(text for line in lines for text in _texts(line, widths))

    __repr__ = __str__


_RIGHT = (2, 5)  # columns of numbers, which are never wrapped


def table(model: keras.Layer) -> WeightTable:
    """Returns a table of the parametrized weights of a model.

    Args:
        model: Model or layer: a result of `tfwd.parametrize`, or a model that contains layers of
            `tfwd.layers`, also in nested models. It must be built.

    Returns:
        A list of `WeightRow`s, one per parametrized weight, in the order of the layers. It prints
        as a table with lines of at most 100 characters. Long cells are wrapped.

        - The pattern is the key of `parametrizations` that selected the weight, or `(default)`.
          After loading, a model of `tfwd.parametrize` has the names of its weights as patterns.
        - A schedule, a variable or a `start_call` is followed by its current value, that is, the
          value in the layer's next training call.
        - If two nested wrappers parametrize a weight, each wrapper has a row. The inner wrapper is
          applied first.

    Raises:
        ValueError: If a layer with parametrizations has no weights yet; if a schedule returns a
            wrong value.

    Example:
        >>> import keras, tfwd
        >>> from tfwd import parametrizations as P
        >>> dense = [keras.layers.Dense(4, name="hidden"), keras.layers.Dense(1, name="score")]
        >>> model = keras.Sequential([keras.Input((8,)), *dense])
        >>> decay = keras.optimizers.schedules.PolynomialDecay(0.5, 100, 0.1)
        >>> given = {"score/.*": P.GaussianNoise(0.01), "kernel": P.Dropout(decay)}
        >>> print(P.table(tfwd.parametrize(model, given, seed=1)))
        pattern   weight  shape  parametrization                    layer   calls
        kernel    kernel    8x4  Dropout(PolynomialDecay), now 0.5  hidden      0
        score/.*  kernel    4x1  GaussianNoise(0.01)                score       0
        score/.*  bias        1  GaussianNoise(0.01)                score       0
    """
    rows = []
    for layer in parametrized_layers(model):
        calls = int(layer.draws.calls)
        for weight in layer.weights:
            target = weight.target
            with parametrization_rates.named_in_errors(
                f"weight '{target.name}' of layer '{layer.name}'"
            ):
                text = described(weight.parametrization, calls)
            shape = tuple(target.variable.shape)
            rows.append(WeightRow(weight.pattern, target.name, shape, text, layer.name, calls))
    return WeightTable(rows, model.name)


def described(parametrization: Parametrization, call: int) -> str:
    """Returns the text of a parametrization, with its values in a training call.

    Args:
        parametrization: Parametrization.
        call: int. Number of the training call.

    Example:
        >>> from tfwd import parametrizations as P
        >>> described(P.Chain([P.GaussianNoise(0.1, start_call=9), P.Dropout(0.5)]), 0)
        'GaussianNoise(0.1, start_call=9), now 0; then Dropout(0.5)'
    """
    present = parametrization.at(tf.constant(call, tf.int64))
    pairs = zip(parametrization.elements(), present.elements(), strict=True)
    return "; then ".join(_element(*pair) for pair in pairs)


def _element(element: Parametrization, present: Parametrization) -> str:
    """Returns the text of one parametrization. It omits arguments that have their default."""
    arguments, now = [], []
    for name, parameter in inspect.signature(type(element)).parameters.items():
        value = getattr(element, name, parameter.default)
        required = parameter.default is parameter.empty
        if not required and _is_same(value, parameter.default):
            continue
        arguments.append(_value(value) if required else f"{name}={_value(value)}")
        other = getattr(present, name, value)
        if tf.is_tensor(other) and other is not value and other.shape.rank == 0:
            number = float(other)
            if not (
                parametrization_rates.is_number(value) and np.float32(value) == np.float32(number)
            ):
                now.append((name, f"{number:.4g}"))
    text = f"{type(element).__name__}({', '.join(arguments)})"
    values = [number if len(now) == 1 else f"{name} {number}" for name, number in now]
    return f"{text}, now {', '.join(values)}" if now else text


def _is_same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(np.all(value == default))


def _value(value: Any) -> str:
    """Returns a short text of an argument."""
    if parametrization_rates.is_number(value):
        return f"{value:.6g}"
    if isinstance(value, (str, bool, tuple, list)) or value is None:
        return repr(value)
    if _keras.variables.is_variable(value) or isinstance(value, tf.Variable):
        return f"variable '{_keras.variables.path(value)}'"
    if inspect.isfunction(value):
        return "a function" if value.__name__ == "<lambda>" else value.__name__
    return type(value).__name__


def _cells(row: WeightRow) -> tuple[str, ...]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    pattern = "(default)" if row.pattern is None else row.pattern
    return pattern, row.weight, shape, row.parametrization, row.layer, f"{row.calls:,}"


def _widths(natural: list[int]) -> list[int]:
    """Returns the widths of the columns. Columns of text share the width that is available."""
    texts = [i for i in range(len(natural)) if i not in _RIGHT]
    room = WIDTH - len(GAP) * (len(natural) - 1) - sum(natural[i] for i in _RIGHT)
    widths = list(natural)
    # Narrow columns keep their widths. Wide columns have equal shares of the rest.
    for done, i in enumerate(sorted(texts, key=natural.__getitem__)):
        widths[i] = max(min(natural[i], room // (len(texts) - done)), 1)
        room -= widths[i]
    return widths


def _texts(line: tuple[str, ...], widths: list[int]) -> list[str]:
    """Returns the lines of one row."""
    cells = [
        [cell] if i in _RIGHT else _wrapped(cell, width)
        for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]
    texts = []
    for number in range(max(map(len, cells))):
        parts = [cell[number] if number < len(cell) else "" for cell in cells]
        aligned = [
            part.rjust(width) if i in _RIGHT else part.ljust(width)
            for i, (part, width) in enumerate(zip(parts, widths, strict=True))
        ]
        texts.append(GAP.join(aligned).rstrip())
    return texts


def _wrapped(text: str, width: int) -> list[str]:
    """Wraps a text into lines of at most `width` characters.

    Lines end after spaces, `/` and `|`. A part that is longer than a line is divided after `_`.

    Example:
        >>> _wrapped("encoder/(query|value_dense)/kernel", 14)
        ['encoder/', '(query|', 'value_dense)/', 'kernel']
    """
    pieces: list[str] = []
    for part in re.findall(r"[^ /|]+[ /|]*|[ /|]+", text):
        smaller = [part] if len(part.rstrip()) <= width else re.findall(r"[^_]+_*|_+", part)
        for piece in smaller:
            pieces += [piece[i : i + width] for i in range(0, len(piece.rstrip()), width)]
    lines = [""]
    for piece in pieces:
        if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]
