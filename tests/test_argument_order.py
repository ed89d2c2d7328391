"""Order and kinds of arguments that the documentation promises."""

import inspect

import keras
import pytest

from tfwd import layers, parametrizations

CLASSES = [
    cls
    for name in parametrizations.__all__
    if inspect.isclass(cls := getattr(parametrizations, name))
]
# A wrapper, its parametrization, and the arguments that only the wrapper has.
WRAPPERS = [
    ("WeightDropout", "Dropout"),
    ("VariationalNoise", "GaussianNoise"),
    ("Mixout", "Mixout"),
]
OF_WRAPPER = {"layer", "weights", "seed", "recompute", "share_across_replicas", "exclude", "kwargs"}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_arguments_after_the_first_are_given_by_name(cls: type) -> None:
    _, *others = inspect.signature(cls).parameters.values() or [None]
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in others)


@pytest.mark.parametrize(("wrapper", "parametrization"), WRAPPERS)
def test_a_wrapper_has_the_arguments_of_its_parametrization(
    wrapper: str, parametrization: str
) -> None:
    ours = inspect.signature(getattr(layers, wrapper)).parameters
    theirs = inspect.signature(getattr(parametrizations, parametrization)).parameters
    assert [name for name in ours if name not in OF_WRAPPER] == list(theirs)
    for name, one in theirs.items():
        assert ours[name].default == one.default


@pytest.mark.parametrize("wrapper", [wrapper for wrapper, _ in WRAPPERS])
def test_exclude_matches_the_full_path_or_its_last_components(wrapper: str) -> None:
    def selected(exclude: str | None) -> list[str]:
        layer = getattr(layers, wrapper)(
            keras.layers.LSTM(2, name="rnn"), 0.1, weights=".*kernel", exclude=exclude
        )
        layer.build((None, 3, 4))
        return sorted(name.rpartition("/")[2] for name in layer.effective_weights(0))

    assert selected(None) == ["kernel", "recurrent_kernel"]
    assert selected("kernel") == ["recurrent_kernel"]  # not a part of a component
    assert selected(".*/recurrent_kernel") == ["kernel"]
