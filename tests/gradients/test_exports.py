"""Names that `tfwd.gradients` exports."""

from tfwd import gradients


def test_exports_are_what_users_use() -> None:
    forms = ["Materialized", "OuterProduct", "PerExampleGradient", "Rows"]
    assert sorted(gradients.__all__) == sorted(["Call", "Moments", "moments", "rule", *forms])
