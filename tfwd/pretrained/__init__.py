"""Loads the weights of published models into any Keras model.

- `plan(model, source)` finds which tensor of a file is loaded into which variable. `print` shows
  the plan.
- `load(model, source)` makes a plan, and loads the weights.
- `Key` is a key in a mapping, with more properties than its name.
"""

from tfwd.pretrained.key_rules import Key
from tfwd.pretrained.loading_plan import Plan, PlanError
from tfwd.pretrained.plan_and_load import load, plan
from tfwd.pretrained.sources.base import SourceError

__all__ = ["Key", "Plan", "PlanError", "SourceError", "load", "plan"]
