"""`parametrizations.table`: which weights of a model are parametrized, and how."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import ALL, X, each, subclassed

import tfwd
from tfwd import layers
from tfwd import parametrizations as P

GIVEN = {"(first|shared|dense.*)/kernel": P.Dropout(0.5), "kernel": P.GaussianNoise(0.25)}
FIRST, REST = list(GIVEN)

# The rows of each kind of model, without the parametrization.
ROWS = {
    "sequential": [(FIRST, "kernel", (6, 5), "first", 1), (REST, "kernel", (5, 2), "second", 1)],
    "functional": [(FIRST, "kernel", (6, 6), "shared", 2), (REST, "kernel", (6, 2), "out", 1)],
    "nested": [
        (FIRST, "kernel", (6, 5), "inner/first", 1),
        (REST, "kernel", (5, 2), "inner/second", 1),
        (REST, "kernel", (2, 3), "last", 1),
    ],
}


def without_text(table) -> list[tuple]:
    return [(r.pattern, r.weight, r.shape, r.layer, r.calls) for r in table]


def check_form(table) -> None:
    """Checks that the text fits, and that the cells of a column begin or end at one position."""
    lines = str(table).splitlines()
    assert max(map(len, lines)) <= 100
    head = lines[0]
    assert head.split() == ["pattern", "weight", "shape", "parametrization", "layer", "calls"]
    for name in ("weight", "parametrization", "layer"):
        start = head.index(f" {name}") + 1
        assert all(line[start - 2 : start].strip() == "" for line in lines)
    for name in ("shape", "calls"):
        end = head.index(name) + len(name)
        assert all(line[end : end + 2].strip() == "" for line in lines)
    # No cell loses a character.
    text = "".join(lines[1:]).replace(" ", "")
    cells = [
        str(cell).replace(" ", "")
        for row in table
        for cell in (row.pattern or "(default)", row.weight, row.parametrization, row.layer)
    ]
    assert len(text) == sum(map(len, cells)) + sum(
        len("x".join(map(str, row.shape)) or "scalar") + len(f"{row.calls:,}") for row in table
    )


@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_parametrized_models(kind: str) -> None:
    model = tfwd.parametrize(ALL[kind](), GIVEN, seed=1)
    model(X, training=True)
    table = P.table(model)
    inner = next((x.name for x in model.layers if isinstance(x, keras.Sequential)), "")
    assert without_text(table) == [
        (*row[:3], row[3].replace("inner", inner), row[4]) for row in ROWS[kind]
    ]
    texts = {FIRST: "Dropout(0.5)", REST: "GaussianNoise(0.25)"}
    assert [row.parametrization for row in table] == [texts[row.pattern] for row in table]
    check_form(table)


def test_rows_of_a_model_that_is_wrapped_as_a_whole() -> None:
    plain = subclassed()
    one, two = (block.name for block in plain.blocks)
    given = {f"{one}/kernel": P.Dropout(0.5), ".*": P.GaussianNoise(0.25)}
    model = tfwd.parametrize(plain, given, seed=1, exclude=f"{two}/.*")
    found = [(r.pattern, r.weight, r.parametrization, r.layer, r.calls) for r in P.table(model)]
    noise = "GaussianNoise(0.25)"
    assert found == [
        (f"{one}/kernel", f"{one}/kernel", "Dropout(0.5)", plain.name, 0),
        (".*", f"{one}/bias", noise, plain.name, 0),
        (".*", f"{plain.out.name}/kernel", noise, plain.name, 0),
        (".*", f"{plain.out.name}/bias", noise, plain.name, 0),
    ]
    check_form(P.table(model))


def test_rows_of_tfwds_layers() -> None:
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            layers.DropoutEmbedding(10, 4, 0.125, name="words"),
            layers.WeightDropLSTM(4, 0.25, return_sequences=True, name="lstm"),
            keras.layers.Bidirectional(layers.WeightDropLSTM(5, name="r"), name="both"),
            layers.WeightDropout(
                layers.VariationalNoise(
                    keras.layers.Dense(3, name="dense"), 0.1, "all", start_call=3, name="noisy"
                ),
                0.5,
                noise_shape=(None, 1),
                name="dropped",
            ),
            keras.layers.Dropout(0.5),
        ]
    )
    model(tf.zeros((2, 3), tf.int32), training=True)
    table = P.table(model)
    noise = "GaussianNoise(0.1, start_call=3), now 0"
    assert [(row.pattern, row.weight, row.parametrization, row.layer) for row in table] == [
        ("embeddings", "embeddings", "Dropout(0.125, noise_shape=(None, 1))", "words"),
        ("recurrent_kernel", "recurrent_kernel", "Dropout(0.25)", "lstm"),
        ("recurrent_kernel", "recurrent_kernel", "Dropout(0.5)", "both/forward_r"),
        ("recurrent_kernel", "recurrent_kernel", "Dropout(0.5)", "both/backward_r"),
        (None, "kernel", "Dropout(0.5, noise_shape=(None, 1))", "dropped"),
        ("all", "kernel", noise, "dropped/noisy"),
        ("all", "bias", noise, "dropped/noisy"),
    ]
    assert {row.calls for row in table} == {1}
    check_form(table)
    alone = model.layers[-2]
    assert [row.layer for row in P.table(alone)] == ["dropped", "noisy", "noisy"]


def test_a_schedule_has_its_value_in_the_next_call() -> None:
    falling = keras.optimizers.schedules.PolynomialDecay(0.5, 10, 0.0)
    variable = tf.Variable(0.125, name="deviation")
    given = {"kernel": P.Chain([P.Dropout(falling), P.GaussianNoise(variable)])}
    layer = layers.Parametrized(keras.layers.Dense(3), given)
    for call in range(4):
        layer(tf.ones((1, 2)), training=True)
        variable.assign_add(0.125)
        (row,) = P.table(layer)
        assert row.calls == call + 1
        rate = float(falling(call + 1))
        assert row.parametrization == (
            f"Dropout(PolynomialDecay), now {rate:.4g}; then "
            f"GaussianNoise(variable 'deviation'), now {float(variable):.4g}"
        )


@pytest.mark.parametrize(("start", "now"), [(0, ""), (1, ""), (2, ", now 0")])
def test_noise_that_has_not_started_is_0_now(start: int, now: str) -> None:
    layer = layers.VariationalNoise(keras.layers.Dense(3), 0.3, start_call=start)
    layer(tf.ones((1, 2)), training=True)
    (row,) = P.table(layer)
    shown = f", start_call={start}" if start else ""
    assert row.parametrization == f"GaussianNoise(0.3{shown}){now}"


class Scaled(P.Parametrization):
    """A parametrization of a user, with two schedules."""

    def __init__(self, factor, offset=0.0, mode="plain") -> None:
        self.factor, self.offset, self.mode = factor, offset, mode

    def __call__(self, weight, seed):
        return weight * self.factor + self.offset

    def at(self, call):
        factor = tf.cast(call, tf.float32) * self.factor
        return Scaled(factor, tf.cast(call, tf.float32) + 0.5, self.mode)


@pytest.mark.parametrize(
    ("parametrization", "text"),
    [
        (P.Dropout(lambda call: 0.25), "Dropout(a function), now 0.25"),
        (P.Mixout(0.5, towards="start"), "Mixout(0.5)"),
        (P.Mixout(0.5, towards={"kernel": np.ones((2, 3))}), "Mixout(0.5, towards=dict)"),
        (P.WeightNorm(), "WeightNorm()"),
        (P.WeightNorm(0, epsilon=0.5), "WeightNorm(axis=0, epsilon=0.5)"),
        (P.GaussianNoise(0.1, scale="deviation"), "GaussianNoise(0.1, scale='deviation')"),
        (Scaled(3.0, mode="other"), "Scaled(3, mode='other'), now 0"),
        (Scaled(3.0, 7.0), "Scaled(3, offset=7), now factor 0, offset 0.5"),
    ],
)
def test_texts_of_parametrizations(parametrization: P.Parametrization, text: str) -> None:
    layer = layers.Parametrized(keras.layers.Dense(3), {"kernel": parametrization})
    layer.build((None, 2))
    assert [row.parametrization for row in P.table(layer)] == [text]


def test_long_cells_take_several_lines_and_lose_nothing() -> None:
    long = "a_layer_with_a_name_that_nobody_would_type_twice"
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5, name=long)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, name=f"{long}_again")(hidden))
    noise = P.Chain([P.GaussianNoise(0.1, start_call=1000), P.Dropout(0.5, noise_shape=(None, 1))])
    given = {f"({long}|another_layer_that_is_not_there)/kernel": noise, "all": P.GaussianNoise(0.1)}
    table = P.table(tfwd.parametrize(model, given))
    assert len(table) == 4
    check_form(table)


def test_a_loaded_model_names_its_weights(tmp_path: Path) -> None:
    model = tfwd.parametrize(ALL["sequential"](), GIVEN, seed=1)
    model(X, training=True)
    model.save(tmp_path / "model.keras")
    table = P.table(keras.saving.load_model(tmp_path / "model.keras"))
    assert [(r.pattern, r.layer, r.calls) for r in table] == [
        ("kernel", "first", 1),
        ("kernel", "second", 1),
    ]


def test_a_model_without_parametrized_weights_has_an_empty_table() -> None:
    table = P.table(keras.layers.Dense(3, name="plain"))
    assert len(table) == 0
    assert str(table) == "'plain' has no parametrized weights"


def test_weights_that_do_not_exist_yet_are_an_error() -> None:
    model = keras.Sequential([layers.WeightDropout(keras.layers.Dense(3, name="late"), 0.5)])
    with pytest.raises(ValueError, match="'late' has no weights yet: build it or call it first"):
        P.table(model)


def test_a_wrong_value_of_a_schedule_names_the_weight() -> None:
    rate = tf.Variable(0.5)
    layer = layers.WeightDropout(keras.layers.Dense(3, name="dense"), rate, name="dropped")
    layer.build((None, 2))
    rate.assign(2.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="'kernel' of layer 'dropped'"):
        P.table(layer)


@each
def test_the_table_changes_nothing(kind: str) -> None:
    model = tfwd.parametrize(ALL[kind](), {"kernel": P.Mixout(0.5)}, seed=1)
    before = [np.asarray(v) for v in model.variables]
    str(P.table(model))
    for old, new in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, new)
