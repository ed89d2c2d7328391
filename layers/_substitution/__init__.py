"""Runs a layer on effective weights in place of its own: the machinery under the public layers.

Start at `weight_perturbation`, which every wrapper inherits. `CONTRIBUTING.md` follows one call
through these modules.
"""
