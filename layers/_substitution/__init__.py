"""The machinery of the public layers: runs a layer on effective weights instead of its own.

Start at `weight_perturbation`, which every wrapper inherits. `CONTRIBUTING.md` follows one call
through these modules.
"""
