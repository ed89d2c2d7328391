"""tfwd-generate: writes text with a trained model."""

from __future__ import annotations

import sys
from typing import Any

from absl import flags

from tfwd.lm.data.splits_and_tokens import tokenize
from tfwd.runs import command_runner

ABOUT = """
Writes text with a trained model.

    tfwd-generate --workdir=runs/quickstart
    tfwd-generate --workdir=runs/quickstart --prompt="The class" --temperature=0.5 --seed=7

The same flags give the same text. Unknown tokens are never written.
"""


def run() -> None:
    """Runs the console script."""
    command_runner.run(main, define, ABOUT)


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    flags.mark_flag_as_required("workdir", values)
    flags.DEFINE_string("checkpoint", "best", "best or last", flag_values=values)
    flags.DEFINE_integer(
        "tokens", 200, "number of words or characters to write", flag_values=values
    )
    flags.DEFINE_float(
        "temperature",
        0.8,
        "1: the model's probabilities; lower: prefer likely tokens; 0: the most likely token",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "top_k", 0, "draw from the k most likely tokens; 0: from all", flag_values=values
    )
    flags.DEFINE_integer(
        "seed", 0, "seed of the draws; another seed gives another text", flag_values=values
    )
    flags.DEFINE_string("prompt", "", "text to continue", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Prints the text."""
    from tfwd.lm.program import load
    from tfwd.lm.sampling import check_options, generate

    options: dict[str, Any] = {
        name: values[name].value for name in ("tokens", "temperature", "top_k", "seed")
    }
    check_options(**options)  # before the model is read, which is slow
    saved = load(values.workdir, values.checkpoint)
    unknown = saved.vocabulary.unknown(tokenize(values.prompt, saved.vocabulary.level))
    if unknown:
        listed = ", ".join(unknown)
        print(f"not in the vocabulary, read as unknown: {listed}", file=sys.stderr)
    print(generate(saved.model, saved.vocabulary, prompt=values.prompt, **options))
