"""Small models of each family and their outputs, written by Hugging Face's own classes.

    .venv-bench/bin/python tests/layers/transformer/write_published.py

It needs PyTorch and transformers. The tests read its files in `published/`, a few kB each.
"""

import json
import shutil
import sys
from pathlib import Path

sys.modules.setdefault("triton", None)  # type: ignore[arg-type]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

HERE = Path(__file__).parent / "published"
SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 12,
}
DISTIL = {
    "vocab_size": 20,
    "dim": 8,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 12,
    "max_position_embeddings": 12,
}
T5 = {
    "vocab_size": 20,
    "d_model": 8,
    "d_kv": 3,
    "d_ff": 12,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
}
# The class, with the keys of its config.
MODELS = {
    "bert": ("BertModel", SIZES),
    "bert_with_heads": ("BertForPreTraining", {**SIZES, "hidden_act": "gelu_new"}),
    "roberta": ("RobertaModel", {**SIZES, "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "distilbert": ("DistilBertForSequenceClassification", DISTIL),
    "electra": ("ElectraForPreTraining", {**SIZES, "embedding_size": 4}),
    "albert": ("AlbertModel", {**SIZES, "embedding_size": 4, "num_hidden_layers": 3}),
    "albert_in_groups": (
        "AlbertModel",
        {**SIZES, "embedding_size": 4, "num_hidden_layers": 4, "num_hidden_groups": 2},
    ),
    "data2vec_text": ("Data2VecTextModel", {**SIZES, "type_vocab_size": 1}),
    "ernie": ("ErnieForMaskedLM", SIZES),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5_gated": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
    "t5_activation": (
        "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "dense_act_fn": "relu"},
    ),
}


def inputs(padding: int) -> dict[str, np.ndarray]:
    """Returns three texts, two of them padded."""
    ids = np.random.default_rng(1).integers(4, 20, (3, 9))
    ids[1, 6:] = ids[2, 3:] = padding
    mask = (ids != padding).astype("int64")
    return {"input_ids": ids, "attention_mask": mask}


def write(name: str) -> None:
    """Writes a model, its config, its inputs and its outputs."""
    kind, said = MODELS[name]
    family = getattr(transformers, kind)
    config = family.config_class(**said)
    torch.manual_seed(0)
    model = family(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the biases and normalizations too
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    given = inputs(config.pad_token_id)
    if getattr(config, "type_vocab_size", 0) > 1:
        given["token_type_ids"] = (np.arange(9) > 4).astype("int64")[None].repeat(3, 0)
    if name.startswith("t5"):
        given["decoder_input_ids"] = np.random.default_rng(2).integers(1, 20, (3, 7))
    whole = model if name.startswith("t5") else model.base_model
    tensors = {key: torch.tensor(value) for key, value in given.items()}
    with torch.no_grad():
        found = whole(**tensors, output_hidden_states=True)
    expected = dict(given)
    for key in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        for i, state in enumerate(found.get(key) or ()):
            expected[f"{key}.{i}"] = state.numpy()
    for key in ("pooler_output", "logits"):
        if found.get(key) is not None:
            expected[key] = found[key].numpy()
    np.savez_compressed(folder / "expected.npz", **expected)
    for extra in folder.glob("generation_config.json"):
        extra.unlink()
    said = json.loads((folder / "config.json").read_text())
    said.pop("transformers_version", None)
    (folder / "config.json").write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    for name in MODELS:
        write(name)
        size = sum(path.stat().st_size for path in (HERE / name).iterdir())
        print(f"{name}: {size / 1000:.0f} kB")
