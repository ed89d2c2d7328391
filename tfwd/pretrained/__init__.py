"""Weights of published models, into any Keras model: a plan first, then one tensor at a time.

- `plan(model, source)` says which tensor of a file becomes which variable; `print` shows it.
- `load(model, source)` does it.
- `Key`: what a mapping can say of a key besides its name.
- `open_source(path)`: names, shapes and dtypes of what a file has.
"""

from tfwd.pretrained.mapping import Key, Known
from tfwd.pretrained.opening import open_source
from tfwd.pretrained.plan import Plan, PlanError
from tfwd.pretrained.planning import load, plan
from tfwd.pretrained.sources import SourceError

__all__ = ["Key", "Known", "Plan", "PlanError", "SourceError", "load", "open_source", "plan"]
