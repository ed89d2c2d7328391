"""BERT and ALBERT in NumPy, from Hugging Face's tensor names: an oracle independent of tfwd."""

import json

import numpy as np
from safetensors.numpy import save_file
from scipy import special

SIZES = {
    "vocab_size": 20,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 10,
    "max_position_embeddings": 12,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}


def gelu(x):
    return x * 0.5 * (1 + special.erf(x / np.sqrt(2)))


def gelu_new(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


# By the formulas of transformers' activations.py.
ACTIVATIONS = {
    "gelu": gelu,
    "gelu_python": gelu,
    "gelu_10": lambda x: np.clip(gelu(x), -10, 10),
    "gelu_new": gelu_new,
    "gelu_fast": gelu_new,
    "gelu_accurate": gelu_new,
    "gelu_pytorch_tanh": gelu_new,
    "gelu_python_tanh": gelu_new,
    "quick_gelu": lambda x: x * special.expit(1.702 * x),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "relu6": lambda x: np.clip(x, 0, 6),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "silu": lambda x: x * special.expit(x),
    "swish": lambda x: x * special.expit(x),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "sigmoid": special.expit,
    "tanh": np.tanh,
    "linear": lambda x: x,
}


def publish(folder, **config):
    """Writes a config and a file of random weights, and returns the config and the tensors."""
    config = {**SIZES, "model_type": "bert", "hidden_act": "gelu", **config}
    is_albert = config["model_type"] == "albert"
    width, inner = config["hidden_size"], config["intermediate_size"]
    narrow = config.get("embedding_size", width)
    rng, tensors = np.random.default_rng(7), {}

    def normal(*shape):
        return (0.4 * rng.normal(size=shape)).astype("float32")

    def linear(name, inputs, outputs):
        tensors[f"{name}.weight"] = normal(outputs, inputs)
        tensors[f"{name}.bias"] = normal(outputs)

    def norm(name, size):
        tensors[f"{name}.weight"] = 1 + normal(size)
        tensors[f"{name}.bias"] = normal(size)

    rows = {
        "word_embeddings": config["vocab_size"],
        "position_embeddings": config["max_position_embeddings"],
        "token_type_embeddings": config["type_vocab_size"],
    }
    for name, count in rows.items():
        tensors[f"embeddings.{name}.weight"] = normal(count, narrow)
    norm("embeddings.LayerNorm", narrow)
    if is_albert:
        linear("encoder.embedding_hidden_mapping_in", narrow, width)
    for at in range(groups(config)):
        names = names_of(config, at)
        for part in ("query", "key", "value", "joined"):
            linear(names[part], width, width)
        norm(names["attention_norm"], width)
        linear(names["wide"], width, inner)
        linear(names["narrow"], inner, width)
        norm(names["norm"], width)
    linear("pooler" if is_albert else "pooler.dense", width, width)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return config, tensors


def groups(config):
    return config.get("num_hidden_groups", config["num_hidden_layers"])


def names_of(config, at):
    if config["model_type"] == "albert":
        front = f"encoder.albert_layer_groups.{at}.albert_layers.0."
        return {
            **{part: f"{front}attention.{part}" for part in ("query", "key", "value")},
            "joined": f"{front}attention.dense",
            "attention_norm": f"{front}attention.LayerNorm",
            "wide": f"{front}ffn",
            "narrow": f"{front}ffn_output",
            "norm": f"{front}full_layer_layer_norm",
        }
    front = f"encoder.layer.{at}."
    return {
        **{part: f"{front}attention.self.{part}" for part in ("query", "key", "value")},
        "joined": f"{front}attention.output.dense",
        "attention_norm": f"{front}attention.output.LayerNorm",
        "wide": f"{front}intermediate.dense",
        "narrow": f"{front}output.dense",
        "norm": f"{front}output.LayerNorm",
    }


def encode(config, tensors, ids, seen=None, types=None):
    """Returns the last hidden state and the pooled one, in float64.

    `seen` is `[batch, length, length]`.
    """
    tensors = {name: value.astype("float64") for name, value in tensors.items()}

    def linear(name, x):
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    def norm(name, x):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        x = (x - mean) / np.sqrt(variance + config["layer_norm_eps"])
        return x * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    length, heads = ids.shape[1], config["num_attention_heads"]
    types = np.zeros_like(ids) if types is None else types
    x = tensors["embeddings.word_embeddings.weight"][ids]
    start = 0
    places = np.arange(length)[None]
    if config["model_type"] not in ("bert", "albert"):  # RoBERTa and similar models
        start = config["pad_token_id"]
        is_text = ids != start
        places = np.cumsum(is_text, 1) * is_text + start
    x = x + tensors["embeddings.position_embeddings.weight"][places]
    x = norm("embeddings.LayerNorm", x + tensors["embeddings.token_type_embeddings.weight"][types])
    if config["model_type"] == "albert":
        x = linear("encoder.embedding_hidden_mapping_in", x)
    if seen is None:
        seen = np.ones((len(ids), length, length))
    size = config["hidden_size"] // heads
    for i in range(config["num_hidden_layers"]):
        names = names_of(config, int(i / (config["num_hidden_layers"] / groups(config))))
        q, k, v = (linear(names[part], x) for part in ("query", "key", "value"))
        joined = []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            scores = q[..., part] @ k[..., part].transpose(0, 2, 1) / np.sqrt(size)
            weights = np.exp(scores - scores.max(-1, keepdims=True)) * seen
            joined.append(weights / weights.sum(-1, keepdims=True) @ v[..., part])
        x = norm(names["attention_norm"], x + linear(names["joined"], np.concatenate(joined, -1)))
        between = ACTIVATIONS[config["hidden_act"]](linear(names["wide"], x))
        x = norm(names["norm"], x + linear(names["narrow"], between))
    pooler = "pooler" if config["model_type"] == "albert" else "pooler.dense"
    return x, np.tanh(linear(pooler, x[:, 0]))
