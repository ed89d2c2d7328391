"""Families of published encoders, as data: their config keys and their weight keys.

For each argument of tfwd's layers, a family has the key in `config.json` and the default value. For
each layer of `T.Bert`, by its path, it has the key of the weights in the file, without the last
component. `{}` is the number of a layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfwd.pretrained import Key


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of published models.

    Attributes:
        settings: dict from an argument of tfwd's layers to the config's key and its default value.
        rules: dict from a layer's path to its key in a file.
        fixed: Arguments that are the same in all models of the family.
        beside: Patterns of other keys that files may have, for parts that are not loaded.
        aliases: dict from another name of a config's key to the key.
        optional: Paths in `rules` of parts that the file may have and the layer may not have.
    """

    settings: Mapping[str, tuple[str, Any]]
    rules: Mapping[str, str]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    beside: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optional: tuple[str, ...] = ("pooler/dense",)

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of tfwd's layers for a config."""
        found = {name: config.get(key, value) for name, (key, value) in self.settings.items()}
        return {**found, **self.fixed}

    def rules_for(self, arguments: Mapping[str, Any]) -> Mapping[str, str | Key]:
        """Returns the rules for a model with these arguments."""
        return self.rules


_BERT_SETTINGS = {
    "vocabulary_size": ("vocab_size", 30522),
    "hidden_size": ("hidden_size", 768),
    "num_layers": ("num_hidden_layers", 12),
    "num_heads": ("num_attention_heads", 12),
    "intermediate_size": ("intermediate_size", 3072),
    "activation": ("hidden_act", "gelu"),
    "dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    "max_length": ("max_position_embeddings", 512),
    "type_vocabulary_size": ("type_vocab_size", 2),
    "epsilon": ("layer_norm_eps", 1e-12),
    "initializer": ("initializer_range", 0.02),
    "padding_id": ("pad_token_id", 0),
}

_EMBEDDINGS = {
    "embeddings/words": "embeddings.word_embeddings",
    "embeddings/positions": "embeddings.position_embeddings",
    "embeddings/types": "embeddings.token_type_embeddings",
    "embeddings/LayerNorm": "embeddings.LayerNorm",
}

_BERT_LAYER = {
    "stack/layer_{}/attention/query": "encoder.layer.{}.attention.self.query",
    "stack/layer_{}/attention/key": "encoder.layer.{}.attention.self.key",
    "stack/layer_{}/attention/value": "encoder.layer.{}.attention.self.value",
    "stack/layer_{}/attention/output": "encoder.layer.{}.attention.output.dense",
    "stack/layer_{}/attention_LayerNorm": "encoder.layer.{}.attention.output.LayerNorm",
    "stack/layer_{}/intermediate": "encoder.layer.{}.intermediate.dense",
    "stack/layer_{}/output": "encoder.layer.{}.output.dense",
    "stack/layer_{}/LayerNorm": "encoder.layer.{}.output.LayerNorm",
}

_POOLER = {"pooler/dense": "pooler.dense"}

# Keys of pretraining heads and task heads.
_BESIDE = (
    r"(cls|lm_head|classifier|qa_outputs|predictions|sop_classifier|sequence_summary)\..*",
    r"(generator|discriminator)_(lm_head|predictions)\..*",
    r"vocab_(transform|layer_norm|projector)\..*|pre_classifier\..*",
)

BERT = Family(
    settings=_BERT_SETTINGS,
    rules={**_EMBEDDINGS, **_BERT_LAYER, **_POOLER},
    beside=_BESIDE,
)

ROBERTA = Family(
    settings={
        **_BERT_SETTINGS,
        "vocabulary_size": ("vocab_size", 50265),
        "padding_id": ("pad_token_id", 1),
        "padding_position": ("pad_token_id", 1),
    },
    rules=BERT.rules,
    beside=_BESIDE,
)

DISTILBERT = Family(
    settings={
        "vocabulary_size": ("vocab_size", 30522),
        "hidden_size": ("dim", 768),
        "num_layers": ("n_layers", 6),
        "num_heads": ("n_heads", 12),
        "intermediate_size": ("hidden_dim", 3072),
        "activation": ("activation", "gelu"),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.1),
        "max_length": ("max_position_embeddings", 512),
        "initializer": ("initializer_range", 0.02),
        "padding_id": ("pad_token_id", 0),
    },
    fixed={"epsilon": 1e-12, "type_vocabulary_size": 0},
    rules={
        "embeddings/words": "embeddings.word_embeddings",
        "embeddings/positions": "embeddings.position_embeddings",
        "embeddings/LayerNorm": "embeddings.LayerNorm",
        "stack/layer_{}/attention/query": "transformer.layer.{}.attention.q_lin",
        "stack/layer_{}/attention/key": "transformer.layer.{}.attention.k_lin",
        "stack/layer_{}/attention/value": "transformer.layer.{}.attention.v_lin",
        "stack/layer_{}/attention/output": "transformer.layer.{}.attention.out_lin",
        "stack/layer_{}/attention_LayerNorm": "transformer.layer.{}.sa_layer_norm",
        "stack/layer_{}/intermediate": "transformer.layer.{}.ffn.lin1",
        "stack/layer_{}/output": "transformer.layer.{}.ffn.lin2",
        "stack/layer_{}/LayerNorm": "transformer.layer.{}.output_layer_norm",
    },
    beside=_BESIDE,
    aliases={
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
)

ELECTRA = Family(
    settings={
        **_BERT_SETTINGS,
        "hidden_size": ("hidden_size", 256),
        "num_heads": ("num_attention_heads", 4),
        "intermediate_size": ("intermediate_size", 1024),
        "embedding_size": ("embedding_size", 128),
    },
    rules={**_EMBEDDINGS, "embeddings/projection": "embeddings_project", **_BERT_LAYER},
    beside=_BESIDE,
)

_GROUP = "encoder.albert_layer_groups.{}.albert_layers.0."

ALBERT = Family(
    settings={
        **_BERT_SETTINGS,
        "vocabulary_size": ("vocab_size", 30000),
        "embedding_size": ("embedding_size", 128),
        "hidden_size": ("hidden_size", 4096),
        "num_heads": ("num_attention_heads", 64),
        "intermediate_size": ("intermediate_size", 16384),
        "activation": ("hidden_act", "gelu_new"),
        "dropout": ("hidden_dropout_prob", 0.0),
        "attention_dropout": ("attention_probs_dropout_prob", 0.0),
        "num_shared": ("num_hidden_groups", 1),
    },
    fixed={"project": True},
    rules={
        **_EMBEDDINGS,
        "embeddings/projection": "encoder.embedding_hidden_mapping_in",
        "stack/layer_{}/attention/query": _GROUP + "attention.query",
        "stack/layer_{}/attention/key": _GROUP + "attention.key",
        "stack/layer_{}/attention/value": _GROUP + "attention.value",
        "stack/layer_{}/attention/output": _GROUP + "attention.dense",
        "stack/layer_{}/attention_LayerNorm": _GROUP + "attention.LayerNorm",
        "stack/layer_{}/intermediate": _GROUP + "ffn",
        "stack/layer_{}/output": _GROUP + "ffn_output",
        "stack/layer_{}/LayerNorm": _GROUP + "full_layer_layer_norm",
        "pooler/dense": "pooler",
    },
    beside=_BESIDE,
)

# Missing entries of a config default to BERT's values.
XLM_ROBERTA = dataclasses.replace(
    ROBERTA, settings={**ROBERTA.settings, "vocabulary_size": ("vocab_size", 30522)}
)

FAMILIES = {
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": XLM_ROBERTA,
    "camembert": XLM_ROBERTA,
    "data2vec-text": XLM_ROBERTA,
    "distilbert": DISTILBERT,
    "electra": ELECTRA,
    "albert": ALBERT,
    "ernie": BERT,
}
