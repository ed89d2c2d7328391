"""The question whether Keras defines a class, a function or a method."""

import ast
from pathlib import Path
from typing import Any

import keras
import pytest

import tfwd
from tfwd import _keras


class Renamed(keras.layers.Dense):
    """A subclass that overrides nothing."""


class Doubled(keras.layers.Dense):
    """A subclass with its own call."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        return 2 * super().call(inputs)


@pytest.mark.parametrize(
    ("defined", "method", "expected"),
    [
        (keras.layers.Dense, None, True),
        (keras.layers.Dense, "call", True),
        (keras.layers.Dense, "count_params", True),  # of a base class
        (keras.activations.relu, None, True),
        (Renamed, None, False),
        (Renamed, "call", True),
        (Doubled, None, False),
        (Doubled, "call", False),
        (Doubled, "build", True),
        (tfwd.layers.WeightDropout, "call", False),
        (lambda x: x, None, False),
        (str, None, False),
    ],
)
def test_code_of_keras(defined: Any, method: str | None, expected: bool) -> None:
    assert _keras.is_of_keras(defined, method) is expected


def test_one_function_asks() -> None:
    package = Path(tfwd.__file__).parent
    asking = {
        file.name
        for folder in (package, package / "layers", package / "optimizers")
        for file in folder.resolve().rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Constant) and node.value == "keras."
    }
    assert asking == {"keras_own_code.py"}
