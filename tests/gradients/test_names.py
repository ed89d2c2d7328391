"""Names that `tfwd.gradients` exports, and their former names."""

import warnings

import pytest

from tfwd import gradients


def test_exports_are_what_users_use() -> None:
    forms = ["Materialized", "OuterProduct", "PerExampleGradient", "Rows"]
    assert sorted(gradients.__all__) == sorted(["Call", "Moments", "moments", "rule", *forms])


@pytest.mark.parametrize(
    ("old", "new"),
    [("Term", "PerExampleGradient"), ("Outer", "OuterProduct"), ("Given", "Materialized")],
)
def test_old_name_warns_and_names_the_new_one(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"is now tfwd\.gradients\.{new};") as caught:
        found = getattr(gradients, old)
    assert found is getattr(gradients, new)
    assert caught[0].filename == __file__


def test_no_other_name_warns_or_exists() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in gradients.__all__:
            getattr(gradients, name)
        with pytest.raises(AttributeError, match="has no attribute 'Outers'"):
            _ = gradients.Outers
