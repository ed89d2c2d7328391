"""The two stacks, Keras 3 or Keras 2.15 with tensorflow-addons, and marks for tests."""

import importlib.util

import keras
import pytest

HAS_ADDONS = importlib.util.find_spec("tensorflow_addons") is not None
IS_KERAS_2 = keras.__version__.startswith("2.")


def needs_keras3(what: str) -> pytest.MarkDecorator:
    """Returns the mark of a test of a feature that Keras 2 does not have."""
    return pytest.mark.skipif(IS_KERAS_2, reason=f"Keras 2 has no {what}")


needs_addons = pytest.mark.skipif(
    not HAS_ADDONS,
    reason="tensorflow-addons is on the other stack",
)

# For slow tests in which Keras has no part.
once = pytest.mark.skipif(IS_KERAS_2, reason="the tests on Keras 3 have it")

# For files of tests that hardly depend on Keras's version: `make test` runs them on Keras 3, and
# `make test-slow` on Keras 2 too.
SLOW_ON_KERAS_2 = [pytest.mark.slow] if IS_KERAS_2 else []

# The same, but `make soak` runs them on Keras 2, where other tests cover the same code.
SOAK_ON_KERAS_2 = [pytest.mark.soak] if IS_KERAS_2 else []

# For another use of a feature that has a test: `make test-all` runs it, `make test` does not.
extended = pytest.mark.extended


def quick_rows(*ids: str) -> pytest.MarkDecorator:
    """Returns the mark of a table that names the rows of `make test`; others are extended.

    Args:
        ids: the rows that `make test` runs, as in the brackets of a test's name. A `*` stands for
            any text. An id that no row has is an error.
    """
    return pytest.mark.quick_rows(*ids)


# For more combinations of features that have tests: `make soak` runs it, before a release and when
# the feature has changed.
soak = pytest.mark.soak

# For small variations of other tests: `make test-slow` runs them on Keras 3, `make soak` on
# Keras 2.
rest = soak if IS_KERAS_2 else pytest.mark.slow
