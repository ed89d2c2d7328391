"""BERT of given sizes in keras-hub, and in Hugging Face's transformers for PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import measure
from common.bert import LONGEST, VOCABULARY, Sizes, data


def keras_hub(
    sizes: Sizes, texts: tuple[int, int], dropout: float = 0.0
) -> tuple[Any, Callable[[bool], Any]]:
    """Returns keras-hub's backbone, and its outputs on the texts as a function of `training`."""
    import keras_hub
    import tensorflow as tf

    ids, mask = map(tf.constant, data(texts))
    model = keras_hub.models.BertBackbone(
        VOCABULARY,
        sizes.layers,
        sizes.heads,
        sizes.width,
        sizes.wide,
        dropout=dropout,
        max_sequence_length=LONGEST,
    )
    given = {"token_ids": ids, "padding_mask": mask, "segment_ids": tf.zeros_like(ids)}
    return model, lambda training: model(given, training=training)["sequence_output"]


def hugging_face(
    sizes: Sizes, texts: tuple[int, int], dropout: float = 0.0
) -> tuple[Any, Callable[[], Any]]:
    """Returns Hugging Face's model, and its outputs on the texts as a function."""
    import torch
    import transformers

    measure.equal_threads()
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        intermediate_size=sizes.wide,
        max_position_embeddings=LONGEST,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = transformers.BertModel(config, add_pooling_layer=False)
    ids, mask = (torch.from_numpy(array.astype("int64")) for array in data(texts))
    return model, lambda: model(ids, attention_mask=mask).last_hidden_state
