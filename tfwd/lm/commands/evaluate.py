"""tfwd-evaluate: prints the perplexity of a trained model on a text."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

from absl import flags

from tfwd.lm.data.splits_and_tokens import detokenize, load_splits, read_text, tokenize
from tfwd.runs import command_runner
from tfwd.runs.errors import UserError
from tfwd.runs.workers import worker_flags, worker_start

if TYPE_CHECKING:
    from tfwd.runs.storage.trained_model import TrainedModel
    from tfwd.runs.workers.worker_group import Workers

ABOUT = """
Evaluates a trained model on a text: perplexity, and bits per character.

    tfwd-evaluate --workdir=runs/quickstart
    tfwd-evaluate --workdir=runs/quickstart --text=letter.txt --json

The program evaluates the run's test text, or the text of --text. Every token counts once. At word
level, each line end is a token. The bits per character are the sum of the bits of all tokens,
divided by the number of characters. The characters are the characters that the model sees: words,
one space between two words, and line ends. An unknown word counts as <unk>. Compare results only if
"unknown" is 0, or if the models have the same vocabulary.
"""


def run() -> None:
    """Runs the console script."""
    command_runner.run(main, define, ABOUT)


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    flags.mark_flag_as_required("workdir", values)
    flags.DEFINE_string("text", "", "text file; by default the run's test text", flag_values=values)
    flags.DEFINE_string("checkpoint", "best", "best or last", flag_values=values)
    flags.DEFINE_bool(
        "json", False, "print one line of JSON instead of a table", flag_values=values
    )
    worker_flags.define(values)


def main(values: flags.FlagValues) -> int:
    """Evaluates, and prints the result. Returns the exit code."""
    hint = "start all workers again"
    return worker_start.run_with_workers(
        values, "tfwd-evaluate", lambda workers: _main(values, workers), hint
    )


def _main(values: flags.FlagValues, workers: Workers) -> int:
    from tfwd.lm.program import load
    from tfwd.runs.training.display import Output
    from tfwd.runs.workers import worker_agreement

    worker_agreement.check_versions(workers)
    text = workers.together(lambda: read_text(values.text) if values.text else None)
    saved = workers.together(lambda: load(values.workdir, values.checkpoint))
    worker_agreement.check_weights(workers, saved.model.weights)
    if text is None:
        result = evaluate_test(saved, workers)
    else:
        result = evaluate_text(saved, text, os.path.basename(values.text), workers=workers)
    if not workers.is_chief:
        return 0
    if values.json:
        finite = {k: _finite(v) for k, v in result.items()}
        print(json.dumps(finite))
    else:
        Output().print(table(result))
    return 0


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def evaluate_test(saved: TrainedModel, workers: Workers | None = None) -> dict[str, Any]:
    """Evaluates a model on the test text of its own run, with the batch size of its report.

    Args:
        saved: the trained model.
        workers: as in `evaluate_text`.

    Returns:
        The dict of `evaluate_text`.

    Raises:
        UserError: the text cannot be read, or is not the text of the run. The test part of another
            text might contain training text of the run.
    """
    from tfwd.runs.storage.data_fingerprint import fingerprint

    path, level = saved.config.data.path, saved.config.data.level
    splits = load_splits(path or None)
    texts = {
        name: saved.vocabulary.encode(tokenize(getattr(splits, name), level))
        for name in ("train", "valid", "test")
    }
    if fingerprint(texts) != saved.progress["data"]:
        source = f"the text in {path}" if path else f"the embedded text ({splits.name})"
        raise UserError(f"{source} is not the text that the run was trained on; give --text=FILE")
    return evaluate_text(
        saved,
        splits.test,
        f"{splits.name}, test",
        saved.config.data.eval_batch_size,
        workers,
    )


def evaluate_text(
    saved: TrainedModel,
    text: str,
    name: str,
    batch_size: int = 0,
    workers: Workers | None = None,
) -> dict[str, Any]:
    """Evaluates a model on a text.

    With `nats` the mean of -log p(token) over the predicted tokens,

        perplexity = exp(nats),   bits_per_token = nats / log(2),
        bits_per_character = bits_per_token * tokens / characters.

    Args:
        saved: the model, its vocabulary and its configuration.
        text: str. The text.
        name: str. The text's name in the result.
        batch_size: int. The number of columns into which the text is cut. The first token of each
            column is not predicted. Up to `batch_size - 1` tokens at the end of the text are
            dropped. 0 takes the run's `data.eval_batch_size`, or fewer columns for a short text, so
            that each column has at least one window.
        workers: the `Workers` that divide the columns. A single process by default.

    Returns:
        dict with "text", "level", "checkpoint_step", "tokens" and "characters" of the whole text,
        "predicted" tokens, "unknown" (the share of tokens that are `<unk>`), "nats", "perplexity"
        (None if too large for a float), "bits_per_token" and "bits_per_character".

    Raises:
        UserError: the text has fewer than two tokens, or is too short for `batch_size`.
    """
    from tfwd.lm.evaluation import evaluate

    data, vocabulary = saved.config.data, saved.vocabulary
    tokens = tokenize(text, vocabulary.level)
    ids = vocabulary.encode(tokens)
    if not batch_size:
        batch_size = max(1, min(data.eval_batch_size, len(ids) // (data.eval_window + 1)))
    found = evaluate(saved.model, ids, batch_size, data.eval_window, f"the text {name}", workers)
    characters = len(detokenize(tokens, vocabulary.level))
    return {
        "text": name,
        "level": vocabulary.level,
        "checkpoint_step": saved.progress["step"],
        "tokens": len(ids),
        "predicted": found.tokens,
        "characters": characters,
        "unknown": float((ids == vocabulary.unk_id).mean()),
        "nats": found.nats,
        "perplexity": found.perplexity if math.isfinite(found.perplexity) else None,
        "bits_per_token": found.bits,
        "bits_per_character": found.bits * len(ids) / characters,
    }


def table(result: dict[str, Any]) -> Any:
    """Returns the result as a table for a rich console."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE, show_header=False)
    made.add_column()
    made.add_column(justify="right")
    perplexity = result["perplexity"]
    rows = {
        "text": result["text"],
        "checkpoint of step": f"{result['checkpoint_step']:,}",
        "tokens": f"{result['tokens']:,}, predicted {result['predicted']:,}",
        "characters": f"{result['characters']:,}",
        "unknown": f"{result['unknown']:.2%}",
        "perplexity": "too large" if perplexity is None else f"{perplexity:,.2f}",
        "nats per token": f"{result['nats']:.4f}",
        "bits per word": f"{result['bits_per_token']:.4f}",
        "bits per character": f"{result['bits_per_character']:.4f}",
    }
    if result["level"] == "char":
        del rows["bits per word"]  # a token is a character
    for name, value in rows.items():
        made.add_row(name, Text(value))
    return made
