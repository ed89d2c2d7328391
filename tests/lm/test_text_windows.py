"""Columns and windows."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfwd.lm.data import text_windows
from tfwd.runs.errors import UserError


@given(tokens=st.integers(2, 500), batch=st.integers(1, 20), window=st.integers(1, 20))
def test_columns_are_contiguous(tokens, batch, window):
    ids = np.arange(tokens)[::-1]
    if tokens // batch < window + 1:
        with pytest.raises(UserError):
            text_windows.columns(ids, batch, window=window)
        return
    columns = text_windows.columns(ids, batch, window=window)
    assert columns.dtype == np.int32
    assert columns.shape == (batch, tokens // batch)
    assert columns.ravel().tolist() == ids[: columns.size].tolist()
    assert tokens - columns.size < batch


@given(tokens=st.integers(2, 500), batch=st.integers(1, 600), window=st.integers(1, 20))
def test_the_suggested_batch_size_is_the_largest_that_fits(tokens, batch, window):
    ids = np.zeros(tokens, np.int32)
    try:
        text_windows.columns(ids, batch, window=window)
    except UserError as error:
        message = str(error)
        largest = tokens // (window + 1)
        if largest:
            assert message.endswith(f"the largest batch size that fits is {largest}")
            text_windows.columns(ids, largest, window=window)
            with pytest.raises(UserError):
                text_windows.columns(ids, largest + 1, window=window)
        else:
            assert f"even one column needs {window + 1}" in message


def test_too_short_a_text_is_named():
    with pytest.raises(UserError, match=r"the validation text has 5 tokens, too few for 10 col"):
        text_windows.columns(np.arange(5), 10, what="the validation text")
    for arguments in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            text_windows.columns(np.arange(5), arguments[0], window=arguments[1])


@given(n=st.integers(1, 3000), base=st.integers(1, 200))
def test_fixed_lengths(n, base):
    lengths = text_windows.window_lengths(n, base, random=False)
    assert lengths.dtype == np.int32
    assert lengths.sum() == n
    assert (lengths[:-1] == base).all()
    assert 1 <= lengths[-1] <= base


@given(
    n=st.integers(1, 3000),
    base=st.integers(1, 200),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 1000),
)
def test_random_lengths(n, base, seed, epoch):
    lengths = text_windows.window_lengths(n, base, random=True, seed=seed, epoch=epoch)
    assert lengths.dtype == np.int32
    assert lengths.sum() == n
    assert (lengths[:-1] >= text_windows.SHORTEST).all()
    assert lengths[-1] >= 1
    again = text_windows.window_lengths(n, base, random=True, seed=seed, epoch=epoch)
    assert lengths.tolist() == again.tolist()


def test_random_lengths_differ_by_seed_and_epoch():
    drawn = {
        tuple(text_windows.window_lengths(1000, 70, random=True, seed=seed, epoch=epoch))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(drawn) == 9


def mixture_below(value, base):
    """Returns P(length <= value) of the published rule, for an integer above the least length."""

    def normal(mean):
        return (1 + math.erf((value + 0.5 - mean) / text_windows.DEVIATION / math.sqrt(2))) / 2

    return (1 - text_windows.HALVED) * normal(base) + text_windows.HALVED * normal(base / 2)


def test_distribution_of_random_lengths():
    """Checks the share of each length and of the halved windows, to five standard errors."""
    lengths = text_windows.window_lengths(20_000_000, 70, random=True, seed=3)[:-1]
    count = len(lengths)

    def agrees(seen, probability):
        return abs(seen - probability) < 5 * math.sqrt(probability * (1 - probability) / count)

    assert (text_windows.HALVED, text_windows.DEVIATION) == (0.05, 5.0)
    assert agrees((lengths <= 52).mean(), mixture_below(52, 70))  # between the two means
    assert mixture_below(52, 70) == pytest.approx(0.05, abs=3e-4)
    checked = 0
    for value in range(6, 100):
        probability = mixture_below(value, 70) - mixture_below(value - 1, 70)
        if probability * count > 100:
            checked += 1
            assert agrees((lengths == value).mean(), probability), value
    assert checked > 50


def test_short_base_gives_at_least_five():
    lengths = text_windows.window_lengths(100_000, 6, random=True)
    assert lengths[:-1].min() == 5
    share = (lengths[:-1] == 5).mean()
    expected = mixture_below(5, 6)
    assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / len(lengths))


def test_lengths_of_nothing_are_refused():
    for n, base in ((0, 5), (5, 0)):
        with pytest.raises(ValueError, match="both must be at least 1"):
            text_windows.window_lengths(n, base, random=False)


@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(1, 4),
    steps=st.integers(1, 120),
    base=st.integers(1, 40),
    random=st.booleans(),
    data=st.data(),
)
def test_windows_put_together_are_the_columns(batch, steps, base, random, data):
    columns = np.random.default_rng(steps).integers(0, 1000, [batch, steps + 1]).astype(np.int32)
    lengths = text_windows.window_lengths(steps, base, random=random)
    first = data.draw(st.integers(0, len(lengths)))
    pairs = [
        (inputs.numpy(), targets.numpy())
        for inputs, targets in text_windows.windows(columns, lengths, first)
    ]
    assert [inputs.shape for inputs, _ in pairs] == [(batch, n) for n in lengths[first:]]
    start = int(lengths[:first].sum())
    empty = [np.zeros([batch, 0], np.int32)]
    inputs = np.concatenate([pair[0] for pair in pairs] or empty, axis=1)
    targets = np.concatenate([pair[1] for pair in pairs] or empty, axis=1)
    np.testing.assert_array_equal(inputs, columns[:, start:-1])
    np.testing.assert_array_equal(targets, columns[:, start + 1 :])


def test_windows_leave_the_length_open():
    dataset = text_windows.windows(np.arange(22).reshape(2, 11), np.array([4, 4, 2]))
    for spec in dataset.element_spec:
        assert spec.shape.as_list() == [2, None]
        assert spec.dtype.name == "int32"


def test_windows_refuse_other_lengths():
    columns = np.arange(22).reshape(2, 11)
    with pytest.raises(ValueError, match="add up to 11, not to 10 steps"):
        text_windows.windows(columns, np.array([5, 6]))
    with pytest.raises(ValueError, match="there are 2 windows"):
        text_windows.windows(columns, np.array([5, 5]), first=3)
