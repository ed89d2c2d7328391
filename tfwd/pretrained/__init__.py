"""Weights of published models, into any Keras model: a plan first, then one tensor at a time.

- `plan(model, source)` says which tensor of a file becomes which variable; `print` shows it.
- `load(model, source)` does it.
- `Key`: what a mapping can say of a key besides its name.
- `open_source(path)`: names, shapes and dtypes of what a file has.
"""

from tfwd.pretrained.key_rules import Key
from tfwd.pretrained.make_plan import load, plan
from tfwd.pretrained.plan import Plan, PlanError
from tfwd.pretrained.sources.base import SourceError
from tfwd.pretrained.sources.opening import open_source

__all__ = ["Key", "Plan", "PlanError", "SourceError", "load", "open_source", "plan"]
