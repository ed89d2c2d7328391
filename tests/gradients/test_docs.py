"""Agreement of docs/gradient_moments.md with the code."""

import sys
from pathlib import Path

from tfwd.gradients.rules import registry


def test_every_rule_is_named(root: Path) -> None:
    text = (root / "docs" / "gradient_moments.md").read_text("utf-8")
    rules = {
        function.__name__
        for function in registry._rules.values()
        # An example in a docstring may have registered one of its own.
        if vars(sys.modules.get(function.__module__, sys)).get(function.__name__) is function
        and function.__module__.startswith("tfwd.")
    }
    assert not {name for name in rules if f"`{name}`" not in text}
