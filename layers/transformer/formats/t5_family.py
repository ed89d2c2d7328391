"""The family T5, as data: its config keys and its weight keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfwd.layers.transformer.formats.encoder_families import Family
from tfwd.pretrained import Key


def _layers(stack: str, norms: Mapping[str, str], parts: Mapping[str, str]) -> dict[str, str]:
    front = f"{stack}.block.{{}}.layer"
    return {
        **{f"{stack}/layer_{{}}/{ours}": f"{front}.{theirs}" for ours, theirs in norms.items()},
        **{f"{stack}/layer_{{}}/{ours}": f"{front}.{theirs}" for ours, theirs in parts.items()},
        f"{stack}/relative_positions/buckets": (
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        ),
        f"{stack}/final_norm": f"{stack}.final_layer_norm",
    }


def _attention(ours: str, theirs: str) -> dict[str, str]:
    names = {"query": "q", "key": "k", "value": "v", "output": "o"}
    return {f"{ours}/{name}": f"{theirs}.{short}" for name, short in names.items()}


def _dense_layers(layer: int) -> dict[str, str]:
    """Returns the keys of the dense layers. The gated kind has two layers in place of "wi"."""
    front = f"{layer}.DenseReluDense"
    return {"intermediate": f"{front}.wi", "output": f"{front}.wo"}


class T5Family(Family):
    """The T5 family. Its activation and its head depend on the config."""

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        found = super().arguments(config)
        kind = config.get("feed_forward_proj", "relu")
        name = kind.removeprefix("gated-")
        gated = kind != name
        activation = "gelu_new" if gated and name == "gelu" else name
        tied = config.get("tie_word_embeddings", True)
        return {
            **found,
            # Hugging Face also writes the result of `feed_forward_proj`, and follows it.
            "gated": config.get("is_gated_act", gated),
            "activation": config.get("dense_act_fn", activation),
            "tied": tied,
            "scaled": config.get("scale_decoder_outputs", tied),
        }

    def rules_for(self, arguments: Mapping[str, Any]) -> dict[str, str | Key]:
        rules: dict[str, str | Key] = dict(self.rules)
        if arguments["gated"]:
            for path, key in self.rules.items():
                if path.endswith("/intermediate"):
                    rules[path] = f"{key}_0"
                    rules[path.replace("intermediate", "gate")] = f"{key}_1"
        copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
        if arguments["tied"]:
            copies.append("lm_head.weight")
        else:
            rules["head"] = "lm_head"
        rules["shared"] = Key("shared", copies=tuple(copies))
        return rules


T5 = T5Family(
    settings={
        "vocabulary_size": ("vocab_size", 32128),
        "hidden_size": ("d_model", 512),
        "head_size": ("d_kv", 64),
        "intermediate_size": ("d_ff", 2048),
        "num_layers": ("num_layers", 6),
        "num_decoder_layers": ("num_decoder_layers", None),
        "num_heads": ("num_heads", 8),
        "num_buckets": ("relative_attention_num_buckets", 32),
        "max_distance": ("relative_attention_max_distance", 128),
        "dropout": ("dropout_rate", 0.1),
        "epsilon": ("layer_norm_epsilon", 1e-6),
        "padding_id": ("pad_token_id", 0),
        "start_id": ("decoder_start_token_id", 0),
    },
    rules={
        **_layers(
            "encoder",
            {"attention_norm": "0.layer_norm", "norm": "1.layer_norm"},
            {**_attention("attention", "0.SelfAttention"), **_dense_layers(1)},
        ),
        **_layers(
            "decoder",
            {
                "attention_norm": "0.layer_norm",
                "context_norm": "1.layer_norm",
                "norm": "2.layer_norm",
            },
            {
                **_attention("attention", "0.SelfAttention"),
                **_attention("context_attention", "1.EncDecAttention"),
                **_dense_layers(2),
            },
        ),
    },
    # The first checkpoints have an unused position bias for the decoder's attention to the context.
    beside=(
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
        r"(classification_head|classifier|qa_outputs)\..*",
    ),
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
)
