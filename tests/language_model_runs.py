"""A run's folder without training, and `tfwd-tune` in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sweep_tools
from watched_processes import Processes

from tfwd.lm.config import default_config
from tfwd.lm.data.splits_and_tokens import load_splits, tokenize
from tfwd.lm.data.vocabulary import Vocabulary
from tfwd.lm.model import make_model
from tfwd.lm.program import PROGRAM
from tfwd.runs.storage.data_fingerprint import fingerprint
from tfwd.runs.storage.progress import Progress
from tfwd.runs.storage.run_folder import RunFolder

WORDS = [*"abcdefghij", "the", "cat", "sat", "on", "dog", "saw", "it", "there"]


def some_text(lines: int = 300) -> str:
    """Returns lines of a few words, each of another length and order."""
    return "".join(
        " ".join(WORDS[(i * i + 3 * j) % len(WORDS)] for j in range(3 + i % 5)) + "\n"
        for i in range(lines)
    )


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Yields a starter of processes that end with the test."""
    with Processes() as started:
        yield started


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Returns `make_run(level="word", steps=(10, 20))`: a run's folder with an untrained model.

    Each step has a checkpoint of both kinds, with slightly different weights.
    """

    def make(level: str = "word", steps: tuple[int, ...] = (10, 20), best: bool = True) -> Path:
        text = tmp_path / "text.txt"
        text.write_text(some_text())
        config = default_config()
        config.data.path, config.data.level, config.data.min_count = str(text), level, 1
        config.data.eval_batch_size, config.data.eval_window = 3, 7
        config.model.embedding_dim, config.model.hidden_units = 6, (5, 6)
        splits = load_splits(str(text))
        tokens = {n: tokenize(getattr(splits, n), level) for n in ("train", "valid", "test")}
        vocabulary = Vocabulary.from_tokens(tokens["train"], level, 1)
        data = fingerprint({name: vocabulary.encode(part) for name, part in tokens.items()})
        folder = RunFolder(tmp_path / f"run-{level}", PROGRAM)
        folder.open(config, vocabulary)
        folder.begin()
        folder.close()
        model = make_model(config, len(vocabulary))
        for step in steps:
            model.set_weights([weight * 1.5 for weight in model.get_weights()])
            progress = Progress(step=step, data=data, vocabulary=vocabulary.fingerprint())
            folder.checkpoints.save(step, {"model": model}, progress.to_json())
            if best:
                folder.save_best(model, progress)
        return folder.path

    return make


@pytest.fixture
def run(
    tmp_path: Path,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[int, str, str]]:
    """Returns `run(space, options, *arguments, **training)`: the exit code and the output."""
    sweep_tools.forget_others(monkeypatch)

    def start(*arguments: str, **options: object) -> tuple[int, str, str]:
        return sweep_tools.tune(tmp_path, root, capsys, *arguments, **options)

    return start
