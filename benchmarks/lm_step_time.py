"""A full training step of the AWD-LSTM of published size, in tokens per second: tfwd and PyTorch.

    python benchmarks/lm_step_time.py

The model and the step are from `tfwd-train --config=awd_lstm_ptb`: 24 million weights, 10,000
words, batch 20, time 70, all its dropouts, both activation penalties, clipping and SGD. PyTorch's
side is peers/torch_lm.py. The second row is the model of configs/quickstart.py. Before timing, the
script checks that both sides have the same number of weights, without PyTorch's second biases. It
also checks that the first loss is the loss of guessing, ln(words). The third side computes only the
matrix products of the step (common/matrix_products_alone.py).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import measure
from common.measure import Row, Spread, ratio

PRODUCTS = "products alone"
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def load_config(name: str) -> Any:
    """Returns the configuration of a file in configs/."""
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def quickstart_words(config: Any) -> int:
    """Returns the number of words of the quickstart's text."""
    from tfwd.lm.data import splits_and_tokens, vocabulary

    train = splits_and_tokens.load_splits(config.data.path).train
    tokens = splits_and_tokens.tokenize(train, config.data.level)
    return len(vocabulary.Vocabulary.from_tokens(tokens, config.data.level, config.data.min_count))


def ours(config: Any, words: int) -> tuple[Callable[[np.ndarray, np.ndarray], float], int]:
    """Returns the step of `tfwd.lm` and the number of weights, as `torch_lm.train_step` does."""
    import tensorflow as tf

    from tfwd.lm.model import make_model
    from tfwd.lm.training_step import make_step
    from tfwd.runs.training.step_variables import StepVariables

    model = make_model(config, words)
    state = StepVariables(model.zero_state(config.data.batch_size), config.optimizer.learning_rate)
    step = make_step(config, model, state)

    def run(inputs: np.ndarray, targets: np.ndarray) -> float:
        step(tf.constant(inputs), tf.constant(targets))
        loss = state.take_log_loss()
        if not math.isfinite(loss):
            raise FloatingPointError(f"the step failed: {step.failure()}")
        return loss

    return run, sum(int(np.prod(v.shape)) for v in model.trainable_variables)


def only_products(config: Any, words: int) -> Callable[[], None]:
    """Returns a function that computes the matrix products of the LSTMs and of the softmax."""
    from common import matrix_products_alone

    data, model = config.data, config.model
    units = [*model.hidden_units]
    layers = [
        matrix_products_alone.Lstm(data.window, data.batch_size, *sizes)
        for sizes in zip([model.embedding_dim, *units[:-1]], units, strict=True)
    ]
    return matrix_products_alone.run(
        [*layers, matrix_products_alone.Dense(data.batch_size * data.window, units[-1], words)]
    )


def check(name: str, loss: float, words: int) -> None:
    """Checks that the first loss is the loss of an untrained model, which guesses."""
    if abs(loss - math.log(words)) > 0.1:
        raise AssertionError(
            f"{name}: the first loss is {loss:.3f}; expected ln {words} = {math.log(words):.3f}, "
            "the loss of an untrained model. Check the model's initial weights"
        )


def compare(name: str, config: Any, words: int, seconds: float) -> tuple[dict, dict]:
    """Times the steps of all sides. Returns the seconds, and facts for the JSON line."""
    # At the full learning rate, the first step would already change the loss of guessing.
    config.optimizer.learning_rate *= 1e-2
    shape, draw = (config.data.batch_size, config.data.window), np.random.default_rng(0)
    ids = draw.integers(words, size=(2, *shape), dtype=np.int32)
    step, weights = ours(config, words)
    sides = {"ours": step}
    facts = {"words": words, "weights": weights, "first_loss": step(*ids)}
    check("ours", facts["first_loss"], words)
    torch_lm = measure.module("peers.torch_lm", "PyTorch")
    if torch_lm:
        theirs, count = torch_lm.train_step(config, words)
        facts |= {"PyTorch_weights": count, "PyTorch_first_loss": theirs(*ids)}
        check("PyTorch", facts["PyTorch_first_loss"], words)
        if count - weights != (more := 4 * sum(config.model.hidden_units)):
            raise AssertionError(
                f"{name}: tfwd's model has {weights} weights and PyTorch's model has {count}; "
                f"expected {more} more in PyTorch, its second biases. Compare the two models"
            )
        sides["PyTorch"] = theirs
    candidates = {side: lambda run=run: run(*ids) for side, run in sides.items()}
    candidates[PRODUCTS] = only_products(config, words)
    return measure.alternate(candidates, seconds=seconds, warmup=1, title=name), facts


def main() -> None:
    """Measures, and reports a row for each model."""
    seconds = measure.parser(__doc__, seconds=40.0).parse_args().seconds
    measure.module("torch", "PyTorch")
    measure.equal_threads()
    quickstart = load_config("quickstart")
    models = {
        "AWD-LSTM of published size": (load_config("awd_lstm_ptb"), 10_000, 1.6),
        "quickstart": (quickstart, quickstart_words(quickstart), None),
    }
    rows, facts = [], {}
    for number, (name, (config, words, limit)) in enumerate(models.items()):
        found, facts[name] = compare(name, config, words, seconds / (1 + 2 * number))
        tokens = config.data.batch_size * config.data.window
        pace = {side: Spread.of([tokens / t for t in times]) for side, times in found.items()}
        facts[name]["milliseconds"] = measure.milliseconds(found)
        peer = found.get("PyTorch")
        rows.append(
            Row(
                f"a training step, {name} ({facts[name]['weights'] / 1e6:.1f} M weights)",
                ratio(peer, found["ours"]) if peer else pace["ours"],
                "times PyTorch's tokens per second" if peer else "tokens per second",
                pace["ours"].median,
                {"PyTorch": pace["PyTorch"].median if peer else "not installed"},
                "tokens/s",
                at_least=limit if peer else None,
            )
        )
        if peer:
            rows.append(
                Row(
                    f"largest possible gain over PyTorch, {name}",
                    ratio(peer, found[PRODUCTS]),
                    "times PyTorch's tokens per second, with products alone",
                    None,
                    {side: pace[side].median for side in (PRODUCTS, "PyTorch")},
                    "tokens/s",
                )
            )
    measure.report("lm_step_time", rows, models=facts)


if __name__ == "__main__":
    main()
