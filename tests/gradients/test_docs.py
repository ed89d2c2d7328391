"""The examples of docs/gradient_moments.md, one after the other."""

import re
from pathlib import Path

import numpy as np

from tfwd.gradients import registry


def test_examples_run(root: Path) -> None:
    text = (root / "docs" / "gradient_moments.md").read_text("utf-8")
    printed: list[float] = []
    names: dict = {"print": lambda value: printed.extend(np.ravel(value))}
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 3
    try:
        for block in blocks:
            exec(compile(block, "docs/gradient_moments.md", "exec"), names)
    finally:
        registry._rules.pop(names.get("Bilinear"), None)
    assert len(printed) == 2 and all(1 < scale < 1000 for scale in printed)


def test_every_rule_is_named(root: Path) -> None:
    text = (root / "docs" / "gradient_moments.md").read_text("utf-8")
    rules = {
        function.__name__
        for function in registry._rules.values()
        if function.__module__.startswith("tfwd.")
    }
    assert not {name for name in rules if f"`{name}`" not in text}
