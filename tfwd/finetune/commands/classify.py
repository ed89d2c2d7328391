"""tfwd-classify: labels texts with the classifier of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags

from tfwd.runs import command_runner
from tfwd.runs.errors import UserError
from tfwd.runs.storage.file_access import read_text

if TYPE_CHECKING:
    from tfwd.runs.storage.trained_model import TrainedModel

ABOUT = """
Labels texts with a classifier from tfwd-finetune. Reads one text per line. Writes label,
probability and text, separated by tabs.

    tfwd-classify --workdir=runs/finetune --text="Opens a connection to the given host."
    tfwd-classify --workdir=runs/finetune --file=letters.txt > labelled.tsv
    some-program | tfwd-classify --workdir=runs/finetune --json

Without --text and --file, the texts are read from standard input, in groups. A line without text is
an error that names the line; --skip_empty skips such lines. With --json each output line is an
object with the probabilities of all classes.
"""
LINES = 64  # number of lines from a pipe to label together


class Labelled(NamedTuple):
    """Text with its predicted label.

    Attributes:
        text: str. The text.
        label: str. The most probable class.
        probability: float. The probability of this class.
        probabilities: dict of the probabilities of all classes.
    """

    text: str
    label: str
    probability: float
    probabilities: dict[str, float]


def run() -> None:
    """Runs the console script."""
    command_runner.run(main, define, ABOUT)


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    flags.mark_flag_as_required("workdir", values)
    flags.DEFINE_string("text", None, "text to label", flag_values=values)
    flags.DEFINE_string("file", "", "text file, one text per line", flag_values=values)
    flags.DEFINE_string("checkpoint", "best", "best or last", flag_values=values)
    flags.DEFINE_bool("json", False, "print lines of JSON", flag_values=values)
    flags.DEFINE_bool(
        "skip_empty",
        False,
        "skip lines without text, and write no line for them",
        flag_values=values,
    )


def main(values: flags.FlagValues) -> None:
    """Labels the texts, and prints the labels."""
    if values.text is not None and values.file:
        raise UserError("--text and --file cannot be combined: give one of them")
    given: list[tuple[str, str]] | None = None
    if values.text is not None:
        given = list(numbered([values.text.replace("\n", " ")], "--text", one=True))
    elif values.file:
        lines = read_text(values.file).rstrip("\n").split("\n")
        given = list(numbered(lines, values.file, skip=values.skip_empty))
    from tfwd.finetune.program import load

    saved = load(values.workdir, values.checkpoint)
    label = Labeller(saved)
    if given is not None:
        _print(label(given), values.json)
        return
    for together in _chunks(numbered(_standard_input(), "standard input", skip=values.skip_empty)):
        _print(label(together), values.json)


class Labeller:
    """Classifier of texts, from a trained model.

    Args:
        saved: the trained model.
    """

    def __init__(self, saved: TrainedModel):
        from tfwd.finetune.evaluation import Predictor

        data = saved.config.data
        self._vocabulary, self._most = saved.vocabulary, data.max_length
        self._predict = Predictor(
            saved.model, saved.vocabulary.padding_id, data.eval_batch_size, data.max_length
        )

    def __call__(self, texts: list[tuple[str, str]]) -> Iterator[Labelled]:
        """Yields the labels of texts.

        Args:
            texts: pairs of a source, for error messages, and a text.

        Raises:
            UserError: the model's outputs are not finite.
        """
        import numpy as np

        from tfwd.finetune.evaluation import log_probabilities

        if not texts:
            return
        labels = self._vocabulary.labels
        ids = self._vocabulary.encode([text for _, text in texts], self._most)
        logits = self._predict(ids)
        assert logits is not None  # nothing stops it
        for (where, text), row in zip(texts, logits, strict=True):
            if not np.isfinite(row).all():
                raise UserError(f"{where}: the model's outputs for this text are not finite")
            shares = np.exp(log_probabilities(row)).tolist()
            best = int(row.argmax())
            yield Labelled(text, labels[best], shares[best], dict(zip(labels, shares, strict=True)))


def numbered(
    lines: Iterable[str], source: str, one: bool = False, skip: bool = False
) -> Iterator[tuple[str, str]]:
    """Yields the lines with their sources.

    Args:
        lines: the texts.
        source: str. The name of the file or of another source, for error messages.
        one: bool. True for a single text, which has no line number.
        skip: bool. Skips lines without text.

    Raises:
        UserError: a line has no text, and is not skipped.
    """
    for number, line in enumerate(lines, 1):
        where = source if one else f"{source}, line {number}"
        if not line.strip():
            if skip:
                continue
            hint = "" if one else ", or skip such lines with --skip_empty"
            raise UserError(f"{where}: the text is empty; give a text{hint}")
        yield where, line.strip()


def _standard_input() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(
                f"standard input, line {number} is not UTF-8: byte 0x{line[error.start]:02x} at "
                f"offset {error.start}; convert it to UTF-8"
            ) from error


def _chunks(texts: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yields groups of texts to label together. Texts before an error are still labelled."""
    if sys.stdin.isatty():  # show the label after each typed line
        yield from ([text] for text in texts)
        return
    together: list[tuple[str, str]] = []
    try:
        for text in texts:
            together.append(text)
            if len(together) == LINES:
                yield together
                together = []
    except UserError:
        yield together
        raise
    yield together


def _print(found: Iterable[Labelled], as_json: bool) -> None:
    for labelled in found:
        if as_json:
            facts: dict[str, Any] = labelled._asdict()
            print(json.dumps(facts, ensure_ascii=False))
        else:
            print(f"{labelled.label}\t{labelled.probability:.4f}\t{labelled.text}")
    sys.stdout.flush()
