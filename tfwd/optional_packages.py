"""Packages that only some features need, and that tfwd does not install by default."""

import importlib.util


def require(package: str, feature: str, extra: str) -> None:
    """Checks that a package is installed.

    Args:
        package: str. Import name of the package.
        feature: str. Part of tfwd that needs the package, for the message.
        extra: str. Extra of tfwd that installs the package.

    Raises:
        ImportError: If the package is not installed. The message says how to install it.
    """
    if importlib.util.find_spec(package) is None:
        raise ImportError(
            f"{feature} needs {package}, which is not installed: pip install {package}, or in a "
            f"checkout of tfwd, pip install '.[{extra}]'"
        )
