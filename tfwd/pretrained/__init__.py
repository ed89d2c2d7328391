"""Loads weights of published models into any Keras model: first a plan, then each tensor.

- `plan(model, source)` finds which tensor of a file becomes which variable; `print` shows it.
- `load(model, source)` loads the weights.
- `Key`: a key of a mapping, with more properties than its name.
"""

from tfwd.pretrained.key_rules import Key
from tfwd.pretrained.make_plan import load, plan
from tfwd.pretrained.plan import Plan, PlanError
from tfwd.pretrained.sources.base import SourceError

__all__ = ["Key", "Plan", "PlanError", "SourceError", "load", "plan"]
