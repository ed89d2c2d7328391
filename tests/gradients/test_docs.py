"""The examples of docs/gradient_moments.md, one after the other."""

import re
from pathlib import Path

from tfwd.gradients import registry


def test_examples_run(root: Path) -> None:
    text = (root / "docs" / "gradient_moments.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 3
    names: dict = {}
    try:
        for block in blocks:
            exec(compile(block, "docs/gradient_moments.md", "exec"), names)
    finally:
        registry._rules.pop(names.get("Bilinear"), None)


def test_every_rule_is_named(root: Path) -> None:
    text = (root / "docs" / "gradient_moments.md").read_text("utf-8")
    rules = {
        function.__name__
        for function in registry._rules.values()
        if function.__module__.startswith("tfwd.")
    }
    assert not {name for name in rules if f"`{name}`" not in text}
