"""Parts of the random models: the layers, and the ways to call each.

All values are of four types, so that nearly every choice of arguments is a model: `i` are ids
`[batch, 3]`, `s` a sequence `[batch, 3, 4]`, `v` a vector `[batch, 4]`, `m` a mask `[batch, 3]`.
"""

from typing import NamedTuple

import keras

IS_KERAS_2 = keras.__version__.startswith("2.")


class Form(NamedTuple):
    """One way to call a layer.

    Attributes:
        takes: the arguments' types, a letter each.
        call: the arguments as Python text; `{0}` is the first one.
        gives: the results' types.
    """

    takes: str
    call: str
    gives: str


class Kind(NamedTuple):
    """A layer.

    Attributes:
        make: Python text that makes the layer; `{o}` stands for further keyword arguments.
        forms: the ways to call the layer.
        patterns: patterns that choose the layer's weights; empty without weights. None: default.
        only: "all", or "keras3" if Keras 2 lacks the layer or these arguments.
        stateful: True if a call changes a state that the next call depends on.
    """

    make: str
    forms: tuple[Form, ...]
    patterns: tuple[str | None, ...] = (None, "kernel", ".*")
    only: str = "all"
    stateful: bool = False


S = Form("s", "{0}", "s")
V = Form("v", "{0}", "v")
MASKED = Form("sm", "{0}, mask={1}", "s")
PAIR = Form("ss", "[{0}, {1}]", "s")
TWO = Form("ss", "{0}, {1}", "s")
GATES = (None, "kernel", "recurrent_kernel", "kernel|recurrent_kernel|bias", ".*")

KINDS = {
    "Dense": Kind("keras.layers.Dense(4, activation='tanh'{o})", (S, V)),
    "Regularized": Kind(
        "keras.layers.Dense(4, kernel_regularizer='l2', activity_regularizer='l2'{o})", (S, V)
    ),
    "Embedding": Kind(
        "keras.layers.Embedding(7, 4{o})", (Form("i", "{0}", "s"),), (None, "embeddings", ".*")
    ),
    "MaskedEmbedding": Kind(
        "keras.layers.Embedding(7, 4, mask_zero=True{o})",
        (Form("i", "{0}", "s"),),
        (None, "embeddings", ".*"),
    ),
    "LSTM": Kind(
        "keras.layers.LSTM(4, return_sequences=True{o})",
        (
            S,
            MASKED,
            Form("svv", "{0}, initial_state=[{1}, {2}]", "s"),
            Form("svvm", "{0}, initial_state=[{1}, {2}], mask={3}", "s"),
        ),
        GATES,
    ),
    "LSTMStates": Kind(
        "keras.layers.LSTM(4, return_sequences=True, return_state=True{o})",
        (
            Form("s", "{0}", "svv"),
            Form("svv", "{0}, initial_state=[{1}, {2}]", "svv"),
        ),
        GATES,
    ),
    "LSTMLast": Kind("keras.layers.LSTM(4{o})", (Form("s", "{0}", "v"),), GATES),
    "LSTMStateful": Kind(
        "keras.layers.LSTM(4, return_sequences=True, stateful=True{o})", (S,), GATES, "all", True
    ),
    "LSTMBackwards": Kind(
        "keras.layers.LSTM(4, return_sequences=True, go_backwards=True{o})", (S, MASKED), GATES
    ),
    "GRU": Kind(
        "keras.layers.GRU(4, return_sequences=True{o})",
        (S, MASKED, Form("sv", "{0}, initial_state={1}", "s")),
        GATES,
    ),
    "GRUBefore": Kind(
        "keras.layers.GRU(4, return_sequences=True, reset_after=False{o})", (S,), GATES
    ),
    "SimpleRNN": Kind(
        "keras.layers.SimpleRNN(4, return_sequences=True{o})",
        (S, Form("sv", "{0}, initial_state=[{1}]", "s")),
        GATES,
    ),
    "Stacked": Kind(
        "keras.layers.RNN([keras.layers.LSTMCell(4), keras.layers.GRUCell(4)], "
        "return_sequences=True{o})",
        (S, MASKED),
        (None, ".*recurrent_kernel", ".*"),
    ),
    "Bidirectional": Kind(
        "keras.layers.Bidirectional(keras.layers.LSTM(2, return_sequences=True){o})",
        (S, MASKED),
        (None, ".*recurrent_kernel", ".*kernel"),
    ),
    "MultiHeadAttention": Kind(
        "keras.layers.MultiHeadAttention(2, 2{o})",
        (
            TWO,
            Form("sss", "{0}, {1}, {2}", "s"),
            Form("ss", "{0}, {1}, use_causal_mask=True", "s"),
        ),
        (None, "query/kernel|value/kernel", ".*kernel"),
    ),
    "GroupQueryAttention": Kind(
        "keras.layers.GroupQueryAttention(2, 2, 1{o})", (TWO,), (None, ".*kernel"), "keras3"
    ),
    "AdditiveAttention": Kind(
        "keras.layers.AdditiveAttention({o})",
        (PAIR, Form("ssmm", "[{0}, {1}], mask=[{2}, {3}]", "s")),
        ("scale", ".*"),
    ),
    "Attention": Kind(
        "keras.layers.Attention(use_scale=True{o})",
        (PAIR, Form("ssmm", "[{0}, {1}], mask=[{2}, {3}]", "s")),
        ("scale", ".*"),
    ),
    "Conv1D": Kind("keras.layers.Conv1D(4, 2, padding='same'{o})", (S,)),
    "SeparableConv1D": Kind(
        "keras.layers.SeparableConv1D(4, 2, padding='same'{o})",
        (S,),
        (None, "depthwise_kernel", ".*"),
    ),
    "PReLU": Kind("keras.layers.PReLU(shared_axes=[1]{o})", (S,), (None, "alpha", ".*")),
    "LayerNormalization": Kind(
        "keras.layers.LayerNormalization({o})", (S,), ("gamma", "gamma|beta", ".*")
    ),
    "BatchNormalization": Kind(
        "keras.layers.BatchNormalization(momentum=0.75{o})", (S,), ("gamma|beta", "gamma")
    ),
    "AnyBatchNormalization": Kind(
        "keras.layers.BatchNormalization(momentum=0.75{o})", (S,), (".*",)
    ),
    "TimeDistributed": Kind(
        "keras.layers.TimeDistributed(keras.layers.Dense(4){o})", (S, MASKED), (None, "kernel")
    ),
    "EinsumDense": Kind(
        "keras.layers.EinsumDense('btd,de->bte', (None, 4), bias_axes='e'{o})", (S,)
    ),
    "Late": Kind("Late(2{o})", (S, V), (None, ".*kernel", ".*")),
    "LateVector": Kind("Late(1{o})", (S,), (None, ".*")),
    # On Keras 2 names of variables do not say that the layer is inside another one.
    "LateInTime": Kind(
        "keras.layers.TimeDistributed(Late(1, name='late_{n}'){o})",
        (S,),
        (None, ".*kernel"),
        "keras3",
    ),
    "Gate": Kind("Gate({o})", (TWO,)),
    "Sums": Kind("Sums({o})", (S, MASKED), (None, "kernel"), "all", True),
    "OwnCall": Kind("OwnCall(7, 4{o})", (Form("i", "{0}", "s"),), (None, "embeddings")),
    "OwnCell": Kind("own_cell(keras.layers.LSTM(4, return_sequences=True{o}))", (S, MASKED), GATES),
    "Doubled": Kind("doubled(keras.layers.LSTM(4, return_sequences=True{o}))", (S, MASKED), GATES),
    "DoubledEmbedding": Kind(
        "doubled(keras.layers.Embedding(7, 4{o}))",
        (Form("i", "{0}", "s"),),
        (None, "embeddings"),
    ),
    "Single": Kind("keras.layers.Dense(4, dtype='float32'{o})", (), (None, "kernel")),
    "Reader": Kind("Reader({o})", (), (None, "kernel")),
    "Add": Kind("keras.layers.Add({o})", (PAIR,), ()),
    "Pooling": Kind("keras.layers.GlobalAveragePooling1D({o})", (Form("s", "{0}", "v"),), ()),
    "Repeat": Kind("keras.layers.RepeatVector(3{o})", (Form("v", "{0}", "s"),), ()),
    "Dropout": Kind("keras.layers.Dropout(0.25, seed=7{o})", (S, V), (), "keras3", True),
    # Layers that hold layers: `{a}` and `{b}` are these.
    "Sequential": Kind("keras.Sequential([{a}, {b}]{o})", (S,), (None, ".*kernel", ".*")),
    "Functional": Kind("keras.Model({i}, {b}({a}({i})){o})", (S,), (None, ".*kernel", ".*")),
    "Siamese": Kind(
        "keras.Model([{i}, {j}], {b}(keras.layers.add([{a}({i}), {a}({j})])){o})",
        (PAIR,),
        (None, ".*kernel", ".*"),
    ),
    "Block": Kind("Block([{a}, {b}]{o})", (S,), (None, ".*kernel", ".*")),
    "Compiled": Kind("compiled(Block([{a}, {b}]{o}))", (S,), (None, ".*kernel", ".*")),
    "Tells": Kind("Tells({a}{o})", (TWO,), (None, ".*kernel", ".*")),
    "InTime": Kind(
        "keras.layers.TimeDistributed({a}, dtype='mixed_float16'{o})", (S,), (None, ".*kernel")
    ),
    "Twice": Kind("Twice([{a}, {b}]{o})", (S,), (None, ".*kernel", ".*")),
}
NESTS = ("Sequential", "Functional", "Siamese", "Block", "Compiled", "Tells", "InTime", "Twice")
# Nests that call an inner layer more than once in a call.
REPEATING = ("Siamese", "InTime", "Twice")
# Layers that only some nests hold.
HELD = {"Tells": "Reader", "InTime": "Single"}
NAMES = [
    name for name, kind in KINDS.items() if kind.forms and (kind.only == "all" or not IS_KERAS_2)
]
# Layers in a nest: sequences in, sequences out.
INNER = [name for name in NAMES if S in KINDS[name].forms and name not in NESTS]
