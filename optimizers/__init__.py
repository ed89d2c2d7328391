"""Keras optimizers and what goes around them: imported as ``tfwd.optimizers``.

The sources stand in ``optimizers/`` at the top of the repository and are installed under this name.
"""

# A second copy of a module under another name would silently overwrite the first one's entries
# in Keras's serialization registry, and saved models would then load the wrong classes.
if __name__ != "tfwd.optimizers":
    raise ImportError(
        f"this package is installed as tfwd.optimizers and cannot be imported as {__name__!r}: "
        "write `from tfwd import optimizers` (in a checkout, after `pip install -e .`)"
    )

from tfwd.optimizers.decoupled_weight_decay import DecoupledWeightDecay

__all__ = ["DecoupledWeightDecay"]
