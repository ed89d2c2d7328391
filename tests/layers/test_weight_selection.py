"""Weights that patterns and defaults choose, and the names of weights."""

import re

import keras
import pytest
import tensorflow as tf

from tfwd import parametrizations as P
from tfwd.layers._substitution import weight_selection


def names(layer: keras.Layer, patterns=None) -> list[str]:
    given = P.Dropout(0.5) if patterns is None else dict.fromkeys(patterns, P.Dropout(0.5))
    return [target.name for target, _ in weight_selection.select(layer, given)]


@pytest.fixture
def model() -> keras.Sequential:
    dense = keras.layers.Dense
    return keras.Sequential(
        [keras.Input((3,)), dense(4, name="one"), dense(4, name="two"), dense(4, name="two_b")],
        name="model",
    )


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("kernel", ["one/kernel", "two/kernel", "two_b/kernel"]),
        ("two/kernel", ["two/kernel"]),
        ("two.*/kernel", ["two/kernel", "two_b/kernel"]),
        (".*/kernel", ["one/kernel", "two/kernel", "two_b/kernel"]),
        ("one/.*", ["one/kernel", "one/bias"]),
        ("model/one/kernel", ["one/kernel"]),
        ("(one|two)/bias", ["one/bias", "two/bias"]),
    ],
)
def test_a_pattern_matches_the_whole_path_or_an_end_that_follows_a_slash(
    model, pattern: str, expected: list[str]
) -> None:
    assert names(model, [pattern]) == expected


@pytest.mark.parametrize("pattern", ["ernel", "kern", "one", "wo/kernel", "one/kernel/", "", "o"])
def test_a_part_of_a_name_matches_nothing(model, pattern: str) -> None:
    with pytest.raises(ValueError, match="matches no weight of model 'model'.*two_b/bias"):
        names(model, [pattern])


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        ("score", "score/.*"),
        ("(score|other)", "(score|other)/.*"),
        ("other|score", "(other|score)/.*"),
        ("(?i)SCORE", "(?i)SCORE/.*"),
        ("kern", ".*kern.*"),
    ],
)
def test_a_part_of_a_path_is_told_what_would_match(pattern: str, instead: str) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="score")])
    with pytest.raises(ValueError, match=f"perhaps '{re.escape(instead)}'"):
        weight_selection.match(model, {pattern: 1})
    assert len(weight_selection.match(model, {instead: 1})) == (1 if "kern" in instead else 2)
    for nothing in ("nothing", "(?i)ERNE"):
        with pytest.raises(ValueError, match=r"score/bias$"):
            weight_selection.match(model, {nothing: 1})


def test_the_order_follows_the_weights_not_the_patterns(model) -> None:
    assert names(model, ["two/kernel", "one/kernel"]) == ["one/kernel", "two/kernel"]
    positions = [t.position for t, _ in weight_selection.match(model, {"kernel": 1})]
    assert positions == [0, 2, 4]


class Odd(keras.layers.Layer):
    """A layer with weights of every kind that a rule might get wrong."""

    def build(self, shape) -> None:
        for name in ("kernel", "projection", "debiased", "bias_free", "gamma_ray", "table"):
            self.add_weight(shape=(3, 3), name=name)
        for name in ("bias", "output_bias", "gamma", "beta"):
            self.add_weight(shape=(3, 3), name=name)
        self.add_weight(shape=(3,), name="scale")
        self.add_weight(shape=(), name="temperature")
        self.add_weight(shape=(3, 3), name="count", dtype="int32", initializer="zeros")
        self.add_weight(shape=(3, 3), name="flags", dtype="bool", initializer="zeros")

    def call(self, x):
        return x


def test_defaults_of_a_custom_layer() -> None:
    layer = Odd()
    layer.build(None)
    chosen = names(layer)
    assert {"kernel", "projection", "debiased", "gamma_ray", "table"} <= set(chosen)
    left = {"bias", "output_bias", "gamma", "beta", "scale", "temperature", "count", "flags"}
    assert not set(chosen) & left


@pytest.mark.parametrize(
    ("make", "shapes", "biases"),
    [
        (
            lambda: keras.layers.MultiHeadAttention(2, 3),
            [(2, 3, 4), (2, 5, 4)],
            ["query/bias", "key/bias", "value/bias"],
        ),
        (
            lambda: keras.layers.EinsumDense("abc,cde->abde", (None, 3, 2), bias_axes="de"),
            [(2, 4, 3)],
            ["bias"],
        ),
        (lambda: keras.layers.GRU(3), [(2, 4, 3)], ["bias"]),
    ],
    ids=["MultiHeadAttention", "EinsumDense", "GRU"],
)
def test_biases_of_rank_two_are_no_default(make, shapes, biases: list[str]) -> None:
    layer = make()
    layer(*map(tf.zeros, shapes))
    by_name = {target.name: target.variable for target in weight_selection.all_targets(layer)}
    assert [len(by_name[name].shape) for name in biases] == [2] * len(biases)
    assert not set(biases) & set(names(layer))


def test_a_normalization_over_two_axes_has_no_default() -> None:
    layer = keras.layers.LayerNormalization(axis=(1, 2), name="norm")
    layer.build((2, 3, 4))
    assert len(layer.gamma.shape) == 2
    with pytest.raises(ValueError, match="'norm' has no weight that is parametrized by default"):
        names(layer)


def test_a_container_has_the_union_of_its_layers_defaults() -> None:
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(7, 3),
            keras.layers.Bidirectional(keras.layers.LSTM(2, return_sequences=True, name="r")),
            keras.layers.TimeDistributed(keras.layers.Dense(4, name="d")),
            keras.layers.BatchNormalization(),
        ]
    )
    assert names(model) == [
        "embeddings",
        "forward_r/lstm_cell/recurrent_kernel",
        "backward_r/lstm_cell/recurrent_kernel",
        "d/kernel",
    ]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (".*", ["kernel", "bias", "gamma", "beta"]),
        ("norm/.*", ["gamma", "beta"]),
        ("moving_mean", ["moving_mean"]),
        ("norm/moving_mean", ["moving_mean"]),
        (".*moving_variance", ["moving_variance"]),
        ("norm/(gamma|moving_mean)", ["gamma", "moving_mean"]),
    ],
)
def test_untrained_weights_are_chosen_only_by_their_names(pattern: str, expected) -> None:
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, name="dense"),
            keras.layers.BatchNormalization(name="norm"),
        ]
    )
    assert names(model, [pattern]) == expected
    model.layers[0].trainable = False  # a frozen layer is no such case
    model.layers[1].trainable = False
    assert names(model, [pattern]) == expected


@pytest.mark.parametrize("pattern", [".*", "norm/.*", "moving_(mean|variance)"])
def test_a_pattern_with_nothing_but_what_it_leaves_out_says_so(pattern: str) -> None:
    norm = keras.layers.BatchNormalization(name="norm", center=False, scale=False)
    norm.build((None, 3))
    with pytest.raises(ValueError, match="'norm' that are not trained .*ends in .* name, as 'mov"):
        names(norm, [pattern])


def test_a_weight_that_two_layers_share_is_chosen_once() -> None:
    dense = keras.layers.Dense(3, use_bias=False)
    model = keras.Sequential([keras.Input((3,)), dense, dense])
    assert len(names(model)) == 1


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["a/kernel"], ["kernel"]),
        (["a/kernel", "b/kernel"], ["a/kernel", "b/kernel"]),
        (["x/a/kernel", "y/a/kernel", "b"], ["x/a/kernel", "y/a/kernel", "b"]),
        (["kernel", "recurrent_kernel"], ["kernel", "recurrent_kernel"]),
        (["a", "a"], ["a:0", "a:1"]),
        ([], []),
    ],
)
def test_shortest_unique_ends(paths: list[str], expected: list[str]) -> None:
    assert weight_selection.shortest_names(paths) == expected
