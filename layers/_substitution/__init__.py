"""The internals of the public layers, which run a layer on effective weights.

Start at `weight_perturbation_mixin`, which every wrapper inherits. `CONTRIBUTING.md` follows one
call through these modules.
"""
