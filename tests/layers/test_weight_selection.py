"""Weights that patterns and defaults choose, and the names of weights."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfwd
from tfwd import layers
from tfwd import parametrizations as P
from tfwd.layers._substitution import weight_patterns, weight_selection


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


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        ("words/recurrent_kernel", "words/.*/recurrent_kernel"),
        ("both/forward_words/kernel", "both/forward_words/.*/kernel"),
    ],
)
def test_a_path_that_leaves_out_the_cell_is_told_what_would_match(pattern, instead) -> None:
    lstm = keras.layers.LSTM
    both = keras.layers.Bidirectional(lstm(2, name="words"), name="both")
    model = keras.Sequential(
        [keras.Input((3, 2)), lstm(2, return_sequences=True, name="words"), both]
    )
    with pytest.raises(ValueError, match=f"perhaps '{re.escape(instead)}'"):
        weight_selection.match(model, {pattern: 1})
    assert len(weight_selection.match(model, {instead: 1})) == 1


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
    with pytest.raises(ValueError, match="'norm' that are not trained .*ends in .* name, for ex"):
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
    assert weight_patterns.shortest_names(paths) == expected


EXCLUDED = [
    ([".*"], "bias", ["one/kernel", "two/kernel", "two_b/kernel"]),
    ([".*"], ["bias", "two/.*"], ["one/kernel", "two_b/kernel"]),
    (["kernel"], "one/kernel", ["two/kernel", "two_b/kernel"]),
    (["one/.*", "kernel"], ("one/kernel",), ["one/bias", "two/kernel", "two_b/kernel"]),
    (None, "two.*/kernel", ["one/kernel"]),
    (["all"], ".*_b/.*", ["one/kernel", "one/bias", "two/kernel", "two/bias"]),
    (["kernel"], None, ["one/kernel", "two/kernel", "two_b/kernel"]),
    (["kernel"], [], ["one/kernel", "two/kernel", "two_b/kernel"]),
]


@pytest.mark.parametrize(("patterns", "exclude", "expected"), EXCLUDED)
def test_excluded_weights_are_not_chosen(model, patterns, exclude, expected: list[str]) -> None:
    given = P.Dropout(0.5) if patterns is None else dict.fromkeys(patterns, P.Dropout(0.5))
    wrapped = layers.Parametrized(model, given, exclude=exclude)
    assert list(wrapped.effective_weights(0)) == expected
    again = layers.Parametrized.from_config(wrapped.get_config())
    assert list(again.effective_weights(0)) == expected
    only = [exclude] if isinstance(exclude, str) else list(exclude or []) or None
    assert again.exclude == wrapped.exclude == only


@pytest.mark.parametrize(
    ("patterns", "exclude", "message"),
    [
        (["kernel"], "kernle", r"exclude='kernle' matches no weight of model 'model'; .*one/bias"),
        (["kernel"], ["two"], r"exclude='two' matches no weight.* perhaps 'two/\.\*'"),
        (["kernel"], "bias", r"exclude='bias' excludes nothing: it matches one/bias, .*weights are "
                             r"one/kernel, two/kernel"),
        (None, "bias", r"'bias' excludes nothing"),
        (["one/kernel", "two/kernel"], "one/.*",
         r"exclude=\['one/\.\*'\] excludes all weights .*'one/kernel' matches \(one/kernel\)"),
        (None, "kernel", r"exclude=\['kernel'\] excludes all default weights .* \(one"),
        (["all"], [".*"], r"exclude=\['\.\*'\] excludes all weights .* 'all' matches"),
        (["kernel"], 3, r"layer 'model': exclude=3: expected a pattern"),
        (["kernel"], [3], r"exclude=\[3\]: expected a pattern"),
        (["kernel"], "(", r"exclude='\(', for .* layer 'model', is not a regular expression"),
    ],
)  # fmt: skip
def test_wrong_exclusions(model, patterns, exclude, message: str) -> None:
    given = P.Dropout(0.5) if patterns is None else dict.fromkeys(patterns, P.Dropout(0.5))
    with pytest.raises(ValueError, match=message):
        layers.Parametrized(model, given, exclude=exclude)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["kernel", "one/kernel"],
            r"'one/kernel' selects no weight of model 'model', .*: earlier patterns \('kernel'\) "
            "also match one/kernel. Put 'one/kernel' first",
        ),
        ([".*", "bias"], r"'bias' selects no weight .* \('\.\*'\) also match one/bias"),
        (["all", "kernel"], r"'kernel' selects no weight .* patterns \('all'\) also"),
        (["bias", "kernel", ".*"], r"'\.\*' selects no .* patterns \('kernel', 'bias'\) also"),
    ],
)
def test_a_pattern_that_earlier_ones_shadow_names_them(model, patterns, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        names(model, patterns)


def test_a_pattern_that_is_shadowed_on_some_weights_has_the_others(model) -> None:
    given = {"one/.*": P.Dropout(0.5), "kernel": P.GaussianNoise(0.1)}
    found = {t.name: type(p) for t, p in weight_selection.select(model, given)}
    assert found == {
        "one/kernel": P.Dropout,
        "one/bias": P.Dropout,
        "two/kernel": P.GaussianNoise,
        "two_b/kernel": P.GaussianNoise,
    }
    with pytest.raises(ValueError, match="'one/kernel' selects no weight .*'kernel'.* also match"):
        names(model, ["kernel", "one/kernel"])
    # What is excluded is not shadowed: the rest decides.
    with pytest.raises(ValueError, match="'one/.*' selects no weight .*'kernel'.* also match"):
        weight_selection.match(model, {"kernel": 1, "one/.*": 2}, ["one/bias"])


class WithAll(keras.layers.Layer):
    """A layer with a weight that is named all, and statistics."""

    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(3, 3), name="kernel")
        self.all = self.add_weight(shape=(3,), name="all")
        self.seen = self.add_weight(shape=(3,), name="seen", trainable=False)

    def call(self, x):
        return x @ self.kernel + self.all


@pytest.mark.parametrize(
    "wrap",
    [
        lambda layer: layers.VariationalNoise(layer, 0.075, weights="all", seed=1),
        lambda layer: layers.WeightDropout(layer, 0.5, weights="all", seed=1),
        lambda layer: layers.Mixout(layer, 0.5, weights="all", seed=1),
        lambda layer: layers.Parametrized(layer, {"all": P.Dropout(0.5)}, seed=1),
    ],
    ids=["noise", "dropout", "mixout", "parametrized"],
)
def test_all_stands_for_every_trained_weight(wrap) -> None:
    inner = [
        keras.Input((4, 3)),
        keras.layers.Dense(3, name="dense"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.LSTM(2, name="lstm"),
    ]
    model = keras.Sequential(inner)
    model.get_layer("dense").trainable = False
    expected = ["kernel", "bias", "gamma", "beta", "kernel", "recurrent_kernel", "bias"]
    wrapped = wrap(model)
    assert [name.rpartition("/")[2] for name in wrapped.effective_weights(0)] == expected
    again = type(wrapped).from_config(wrapped.get_config())
    assert [name.rpartition("/")[2] for name in again.effective_weights(0)] == expected


def test_noise_on_all_weights_computes_with_noise_on_each() -> None:
    """The line of Graves's setting, against a plain LSTM with the noisy weights set by hand."""
    noisy = layers.VariationalNoise(keras.layers.LSTM(4), 0.5, weights="all", seed=3)
    x = tf.random.stateless_normal((2, 5, 3), [1, 2])
    found = noisy(x, training=True)
    plain = keras.layers.LSTM(4)
    plain.build((2, 5, 3))
    effective = [value.numpy() for value in noisy.effective_weights(0).values()]
    differences = [a - b for a, b in zip(effective, noisy.layer.get_weights(), strict=True)]
    assert all(np.count_nonzero(d) == d.size for d in differences)
    plain.set_weights(effective)
    np.testing.assert_allclose(found, plain(x), rtol=1e-5, atol=1e-6)


def test_a_weight_that_is_named_all_needs_another_pattern() -> None:
    layer = WithAll(name="mine")
    layer.build(None)
    with pytest.raises(ValueError, match="'all' could .* 'mine', or its weight '.*all'"):
        names(layer, ["all"])
    assert names(layer, ["(all)"]) == ["all"]
    assert names(layer, [".*"]) == ["kernel", "all"]
    inputs = keras.Input((3,))
    model = keras.Model(inputs, layer(inputs))
    given = {"(all)": P.GaussianNoise(1.0), "kernel": P.Dropout(0.5)}
    dropped = tfwd.parametrize(model, given, seed=1)
    assert list(dropped.layers[1].effective_weights(0)) == ["kernel", "all"]
