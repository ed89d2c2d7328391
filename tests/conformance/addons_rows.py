"""Rows of the table for tensorflow-addons' layers and cells, on the stack that has them."""

from __future__ import annotations

import keras
import tensorflow_addons as tfa

from conformance.table_row import Row, floats, given

SEQUENCE = given(floats(2, 4, 3))

ROWS = [
    Row(
        "RNN of tfa's LayerNormLSTMCell",
        lambda: keras.layers.RNN(tfa.rnn.LayerNormLSTMCell(3), return_sequences=True),
        SEQUENCE,
        ("recurrent_kernel",),
    ),
    Row(
        "RNN of tfa's NASCell",
        lambda: keras.layers.RNN(tfa.rnn.NASCell(3)),
        SEQUENCE,
        ("recurrent_kernel",),
    ),
    Row(
        "tfa's MultiHeadAttention",
        lambda: tfa.layers.MultiHeadAttention(head_size=3, num_heads=2),
        given([floats(2, 3, 4), floats(2, 5, 4)]),
        ("query_kernel", "key_kernel", "value_kernel", "projection_kernel"),
    ),
    Row(
        "RNN of tfa's ESNCell",
        lambda: keras.layers.RNN(tfa.rnn.ESNCell(3)),
        SEQUENCE,
        ("recurrent_kernel",),
    ),
]
