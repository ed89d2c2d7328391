"""Table, plot and section of the fine-tuning experiment, made from its finished runs.

    python experiments/fine_tuning_table.py

It reads experiments/results/fine_tuning.jsonl. It writes docs/fine_tuning.png and replaces the
section "Fine-tuning" of docs/results.md between its two markers.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fine_tuning_plan as planning
import language_model_experiment
from fine_tuning_plan import METHODS, TASKS, Run
from fine_tuning_results_file import RESULTS, Lines, read

BEGIN = "<!-- fine-tuning: written by experiments/fine_tuning_table.py -->"
END = "<!-- fine-tuning: end -->"
NAMES = {"trec": "TREC", "sst2": "SST-2"}
# A run failed if it diverged, or if its test accuracy is not above the share of the most frequent
# class by this many percentage points. This was decided before the first final run, after six
# trial runs.
MARGIN = 5.0


class Row(NamedTuple):
    """The final runs of one method on one task.

    Attributes:
        method, strength, rate: As in `Run`.
        test: dict from a seed to the test accuracy in percent. A run that diverged has the share of
            the most frequent class.
        failed: Number of failed runs.
    """

    method: str
    strength: float
    rate: float
    test: dict[int, float]
    failed: int


def accuracy(line: dict[str, Any]) -> float:
    """Returns the test accuracy of a final run in percent."""
    found = line["test_majority"] if line["diverged"] else line["test_accuracy"]
    return 100 * found


def failed(line: dict[str, Any]) -> bool:
    """Returns True if a final run failed."""
    above = accuracy(line) - 100 * line["test_majority"]
    return line["diverged"] or round(above, 6) <= MARGIN


def rows(lines: Lines, task: str, peer: str = "tfwd") -> list[Row]:
    """Returns a row for each method that has final runs with its chosen setting."""
    found = []
    for method, (strength, rate) in planning.choose(lines, task).settings.items():
        wanted = Run("final", peer, task, method, strength, rate, 0)
        made = {run.seed: line for run, line in lines.items() if run._replace(seed=0) == wanted}
        test = {seed: accuracy(made[seed]) for seed in sorted(made)}
        if test:
            row = Row(method, strength, rate, test, sum(map(failed, made.values())))
            found.append(row)
    return found


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean and its standard error. The error is None for fewer than two values."""
    if len(values) < 2:
        return statistics.mean(values), None
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def difference(row: Row, plain: Row) -> tuple[float, float | None] | None:
    """Returns the mean difference to the plain method at equal seeds, and its standard error."""
    pairs = [row.test[seed] - plain.test[seed] for seed in row.test if seed in plain.test]
    return mean_and_error(pairs) if pairs else None


def shown(found: tuple[float, float | None] | None, sign: str = "") -> str:
    """Returns a mean and its error as text."""
    if found is None:
        return ""
    mean, error = found
    return f"{mean:{sign}.1f}" + ("" if error is None else f" ± {error:.1f}")


def table(found: Sequence[Row]) -> str:
    """Returns the results of one task in Markdown."""
    lines = [
        "| method | strength | learning rate | seeds | test accuracy, % | worst seed | failed "
        "| difference to plain |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = next((row for row in found if row.method == "plain"), None)
    for row in found:
        against = difference(row, plain) if plain and row is not plain else None
        test = list(row.test.values())
        lines.append(
            f"| {row.method} | {f'{row.strength:g}' if row.strength else ''} | {row.rate:g} "
            f"| {len(test)} | {shown(mean_and_error(test))} | {min(test):.1f} | {row.failed} "
            f"| {shown(against, '+')} |"
        )
    return "\n".join(lines)


def selection_table(lines: Lines) -> str:
    """Returns each setting of the selection runs with its mean validation loss, in Markdown."""
    settings = dict.fromkeys(run._replace(seed=0) for run in planning.plan(lines, 0))
    text = ["| method | strength | learning rate | TREC | SST-2 |", "|---|---|---|---|---|"]
    cells: dict[tuple[str, float, float], dict[str, str]] = {}
    for one in settings:
        key = one.method, one.strength, one.rate
        runs_of = planning.select(one.task, *key)
        loss = planning.valid_loss(lines, runs_of)
        if all(run in lines for run in runs_of):
            chosen = planning.choose(lines, one.task).settings[one.method] == key[1:]
            value = f"{loss:.3f}" if math.isfinite(loss) else "diverged"
            cells.setdefault(key, {})[one.task] = f"**{value}**" if chosen else value
    order = list(METHODS)
    for key in sorted(cells, key=lambda key: (order.index(key[0]), *key[1:])):
        method, strength, rate = key
        values = " | ".join(cells[key].get(task, "") for task in TASKS)
        text.append(f"| {method} | {f'{strength:g}' if strength else ''} | {rate:g} | {values} |")
    return "\n".join(text)


def peer_table(lines: Lines) -> str:
    """Returns a table of the plain method in tfwd and in PyTorch, at equal seeds, in Markdown."""
    text = ["| task | seeds | tfwd | PyTorch | difference |", "|---|---|---|---|---|"]
    for task in TASKS:
        ours = next((row for row in rows(lines, task) if row.method == "plain"), None)
        theirs = next(iter(rows(lines, task, "pytorch")), None)
        seeds = sorted(set(ours.test) & set(theirs.test)) if ours and theirs else []
        if not ours or not theirs or not seeds:
            continue
        both = [[row.test[seed] for seed in seeds] for row in (ours, theirs)]
        pairs = [a - b for a, b in zip(*both, strict=True)]
        each = [", ".join(f"{value:.1f}" for value in values) for values in both]
        text.append(
            f"| {NAMES[task]} | {', '.join(map(str, seeds))} | {' | '.join(each)} "
            f"| {shown(mean_and_error(pairs), '+')} |"
        )
    return "\n".join(text) if len(text) > 2 else ""


def section(lines: Lines) -> str:
    """Returns the section of docs/results.md, without its markers."""
    finals = {task: rows(lines, task) for task in TASKS}
    finals = {task: found for task, found in finals.items() if found}
    missing = sum(run not in lines for run in planning.plan(lines))
    parts = [
        f"""## Fine-tuning

Question: does fine-tuning on few texts get better if the weights stay near the pretrained weights?

```console
$ make .venv/minilm/model.safetensors
$ python experiments/fine_tuning.py --data=FOLDER --minutes=20
$ python experiments/fine_tuning_torch.py --data=FOLDER
$ python experiments/fine_tuning_table.py
```

The first program makes the runs. It may be stopped at any time, and the same command resumes. All
runs together are planned for at most an hour on two idle cores. Every finished run is a line in
`experiments/results/fine_tuning.jsonl`. The last program makes this section from these lines.

FOLDER has the folders `sst2` and `trec`. SST-2 is the Stanford Sentiment Treebank with two classes
and whole sentences (Socher et al., 2013; https://nlp.stanford.edu/sentiment). TREC is a set of
questions in six classes (Li and Roth, 2002; https://cogcomp.seas.upenn.edu/Data/QA/QC). Each
folder has `train.tsv` and `test.tsv`, and `sst2` has `valid.tsv` too. A line is a text, a tab and
the label.

Each run trains all weights of MiniLM on {planning.EXAMPLES} texts for {planning.EPOCHS} epochs
with Adam, in batches of {planning.BATCH}. The learning rate rises in the first
{planning.WARMUP:.0%} of the steps and then falls linearly. Gradients are clipped at
{planning.CLIP:g}. Texts are cut at {planning.LENGTH} tokens. A mean over the text and a new linear
head follow the encoder. Dropout acts on all activations of the encoder, on attention and before
the head. The other methods act on all kernels of the encoder's layers. The weights after the last
epoch are evaluated on {planning.TEST} test texts. The training and test texts are the same for all
runs. The seed changes the head, the order of the texts, and all draws.

The {planning.VALID} validation texts choose the settings by the mean loss of two seeds. The results
have other seeds.

1. The common learning rate is the best rate of the plain method.
2. The strength of each method is its best strength at the common rate.
3. The learning rate of each method is the common rate or twice that rate.

A run failed if it diverged, or if its test accuracy is at most {MARGIN:g} percentage points above
the share of the most frequent class. This was decided before the runs of the results, after six
trial runs, none of which failed."""
    ]
    if missing:
        parts.append(
            f"**Not finished: {missing} of {len(planning.plan(lines))} runs are still missing.** "
            "The tables have the runs that are finished."
        )
    if lines:
        minutes = sum(line["seconds"] for line in lines.values()) / 60
        parts.append(
            f"The {len(lines)} finished runs took {minutes:.0f} minutes together. Other programs "
            "used the same two cores meanwhile."
        )
    if any(run.kind == "select" for run in lines):
        parts.append("Mean validation loss; the chosen settings are bold:")
        parts.append(selection_table(lines))
    for task, found in finals.items():
        parts.append(
            f"{NAMES[task]}, test accuracy: mean and standard error over the seeds, the worst "
            "seed, failed runs, and the mean difference to the plain method with equal seeds:"
        )
        parts.append(table(found))
    if finals:
        parts.append("![test accuracy of every seed](fine_tuning.png)")
    if peers := peer_table(lines):
        parts.append(
            "The plain method beside the same fine-tuning with Hugging Face's model in PyTorch, "
            "with the same texts, order, schedule and first head. Test accuracy of each seed, in "
            "percent:"
        )
        parts.append(peers)
    return "\n\n".join(parts)


def plot(lines: Lines, path: Path) -> None:
    """Draws the test accuracy of every seed: a panel per task, a column per method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    finals = {task: rows(lines, task) for task in TASKS}
    finals = {task: found for task, found in finals.items() if found}
    figure, panels = plt.subplots(
        len(finals), 1, figsize=(8, 0.4 + 3.0 * len(finals)), squeeze=False
    )
    for axes, (task, found) in zip(panels[:, 0], finals.items(), strict=True):
        for column, row in enumerate(found):
            test = list(row.test.values())
            axes.scatter(
                [column] * len(test),
                test,
                s=18,
                color=language_model_experiment.COLOURS[1],
                alpha=0.6,
            )
            mean = statistics.mean(test)
            axes.hlines(
                mean, column - 0.2, column + 0.2, color=language_model_experiment.COLOURS[1], lw=2
            )
            if row.method == "plain":
                axes.axhline(mean, color=language_model_experiment.COLOURS[0], lw=0.8, ls="--")
        names = [row.method for row in found]
        axes.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
        axes.set(title=NAMES[task], ylabel="test accuracy, %")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def replace_section(page: Path, text: str) -> None:
    """Replaces the text between the two markers of a page.

    Raises:
        ValueError: If the page does not have each marker once, in this order.
    """
    content = page.read_text("utf-8")
    before, begin, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise ValueError(
            f"{page} does not have the lines {BEGIN!r} and {END!r} once each, in this order: "
            "restore these two lines"
        )
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", "utf-8")


def main() -> None:
    """Writes the plot and the section."""
    docs = Path(__file__).resolve().parents[1] / "docs"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of finished runs")
    parser.add_argument("--page", type=Path, default=docs / "results.md", help="page to change")
    parser.add_argument("--plot", type=Path, default=docs / "fine_tuning.png", help="PNG to write")
    given = parser.parse_args()
    lines = read(given.results)
    if any(run.kind == "final" for run in lines):
        plot(lines, given.plot)
    replace_section(given.page, section(lines))
    print(f"{len(lines)} runs: wrote the section of {given.page}")


if __name__ == "__main__":
    main()
