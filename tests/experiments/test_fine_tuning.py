"""The fine-tuning experiment: plan, file of finished runs, table and resets."""

import json
import math
import statistics

import numpy as np
import pytest
from finetune_tools import write_data, write_pretrained
from stack_marks import once, quick_rows

pytestmark = once  # the experiment is made on one stack


def made_up(run, **changes):
    """Returns the fields of a run's line.

    Results improve with the seed. They are best at rate 1e-4 and the second strength.
    """
    import fine_tuning_plan as planning

    strengths = planning.METHODS[run.method]
    loss = 0.5 + abs(math.log(run.rate / 1e-4)) - 0.1 * strengths.index(run.strength)
    accuracy = 0.80 + 0.01 * run.seed + 0.02 * list(planning.METHODS).index(run.method)
    line = {"diverged": False, "valid_loss": loss, "seconds": 2.0, "data": "0" * 16}
    if run.kind == "final":
        line.update({"test_accuracy": accuracy, "test_majority": 0.5})
    return {**line, **changes}


def all_made(path):
    """Returns a file with all runs of both frameworks, made up."""
    import fine_tuning_plan as planning
    import fine_tuning_results_file as file

    for plan in (planning.plan, planning.peer_plan):
        carry_out(path, plan=plan)
    return file.read(path)


def carry_out(path, make=made_up, plan=None, minutes=60.0, clock=lambda: 0.0, shown=None):
    import fine_tuning_plan as planning
    import fine_tuning_results_file as file

    return file.carry_out(
        path,
        plan or planning.plan,
        make,
        minutes,
        lambda run, lines: planning.seconds(run, lines, 2.0),
        lambda lines, left, seconds: None if shown is None else shown.append((len(left), seconds)),
        clock,
    )


def test_selection_comes_first_and_then_the_seeds_of_all_methods(tmp_path):
    import fine_tuning_plan as planning

    order = []
    assert carry_out(tmp_path / "runs.jsonl", lambda run: order.append(run) or made_up(run))
    kinds = [run.kind for run in order]
    finals = [run for run in order if run.kind == "final"]
    assert kinds == sorted(kinds, reverse=True) and len(set(order)) == len(order)
    assert [run.seed for run in finals] == sorted(run.seed for run in finals)
    for seed in range(5):
        found = {(run.task, run.method) for run in finals if run.seed == seed}
        assert len(found) == 2 * len(planning.METHODS) == 14
    assert len(finals) == 70
    assert {run.rate for run in finals} == {1e-4}
    assert {run.strength for run in finals if run.method == "dropout"} == {0.2}
    assert not {run.seed for run in finals} & set(planning.SELECT_SEEDS)


def test_a_stop_loses_the_run_in_progress_only(tmp_path):
    path, made = tmp_path / "runs.jsonl", []

    def stopped(run):
        if len(made) in (3, 90):
            made.append(None)
            raise KeyboardInterrupt
        made.append(run)
        return made_up(run)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            carry_out(path, stopped)
        with open(path, "ab") as file:  # a process that was killed while it wrote
            file.write(b'{"protocol": 1, "kind": "sel')
    assert carry_out(path, stopped)
    whole = tmp_path / "whole.jsonl"
    carry_out(whole)
    assert path.read_text() == whole.read_text()
    assert len(made) == len(path.read_text().splitlines()) + 2


def test_the_time_ends_between_runs(tmp_path):
    path, now, shown = tmp_path / "runs.jsonl", [100.0], []

    def slow(run):
        now[0] += 2.0
        return made_up(run)

    assert not carry_out(path, slow, minutes=0.15, clock=lambda: now[0], shown=shown)
    assert len(path.read_text().splitlines()) == 4  # 9 seconds: a fifth run would end at 10
    left, seconds = shown[-1]
    assert seconds == 2.0 * left and shown[0][0] == left + 4
    assert not carry_out(path, slow, minutes=0.15, clock=lambda: now[0])
    assert len(path.read_text().splitlines()) == 8


def test_wrong_lines_and_other_texts_are_errors(tmp_path):
    import fine_tuning_results_file as file

    path = tmp_path / "runs.jsonl"
    all_made(path)
    file.check_texts(path, {"trec": "0" * 16, "sst2": "0" * 16})
    with pytest.raises(ValueError, match=r"texts of trec have the fingerprint 0{16} .* and f{16}"):
        file.check_texts(path, {"trec": "f" * 16, "sst2": "0" * 16})
    old = json.loads(path.read_text().splitlines()[0]) | {"protocol": 0}
    path.write_text(json.dumps(old) + '\n{"protocol": 1}\n')
    with pytest.raises(ValueError, match="line 2 is not a run .*correct or delete"):
        file.read(path)
    path.write_text(json.dumps(old) + "\n")
    assert file.read(path) == {}


def test_table_and_section_say_what_the_lines_say(tmp_path):
    import fine_tuning_results_file as file
    import fine_tuning_table as table

    path = tmp_path / "runs.jsonl"
    lines = all_made(path)
    bad = next(r for r in lines if r[:4] == ("final", "tfwd", "sst2", "Mixout 0.7") and r.seed == 2)
    low = bad._replace(seed=3)
    file.append(path, bad, made_up(bad, diverged=True, test_accuracy=None))
    file.append(path, low, made_up(low, test_accuracy=0.55))  # exactly the margin
    lines = file.read(path)
    rows = {row.method: row for row in table.rows(lines, "sst2")}
    assert len(rows) == 7 and rows["Mixout 0.7"].failed == 2 and rows["plain"].failed == 0
    assert rows["plain"].test == pytest.approx({seed: 80.0 + seed for seed in range(5)})
    found = [86.0, 87.0, 50.0, 55.0, 90.0]
    pairs = np.subtract(found, [80.0, 81.0, 82.0, 83.0, 84.0])
    assert list(rows["Mixout 0.7"].test.values()) == pytest.approx(found)
    mean, error = statistics.mean(found), np.std(found, ddof=1) / np.sqrt(5)
    expected = (
        f"| Mixout 0.7 | 0.7 | 0.0001 | 5 | {mean:.1f} ± {error:.1f} | 50.0 | 2 "
        f"| {pairs.mean():+.1f} ± {np.std(pairs, ddof=1) / np.sqrt(5):.1f} |"
    )
    text = table.section(lines)
    assert expected in table.table(table.rows(lines, "sst2")).splitlines()
    assert expected in text and "Not finished" not in text
    assert "| SST-2 | 0, 1 | 80.0, 81.0 | 80.0, 81.0 | +0.0 ± 0.0 |" in text
    assert "| dropout | 0.2 | 0.0001 | **0.400** | **0.400** |" in text


@quick_rows("0.3", "1.0")
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_page_and_plot_are_made_of_any_part_of_the_runs(tmp_path, monkeypatch, share, capsys):
    import fine_tuning_results_file as file
    import fine_tuning_table as table

    path, page, plot = (tmp_path / name for name in ("runs.jsonl", "page.md", "plot.png"))
    all_made(path)
    some = path.read_text().splitlines(keepends=True)
    path.write_text("".join(some[: round(share * len(some))]))
    page.write_text(f"# Results\n\n{table.BEGIN}\nREPLACED\n{table.END}\n\nEnd.\n")
    arguments = ["", f"--results={path}", f"--page={page}", f"--plot={plot}"]
    monkeypatch.setattr("sys.argv", arguments)
    for _ in range(2):
        table.main()
        text = page.read_text()
    assert text.startswith("# Results\n\n<!--") and text.endswith("-->\n\nEnd.\n")
    assert "REPLACED" not in text and text.count("## Fine-tuning") == 1
    finals = any(run.kind == "final" for run in file.read(path))
    assert finals == ("](fine_tuning.png)" in text) == plot.exists() == (share > 0.5)
    assert ("Not finished" in text) == (share < 1)
    page.write_text(f"{table.END}\n{table.BEGIN}\n")
    with pytest.raises(ValueError, match="once each, in this order: restore these two lines"):
        table.main()


def test_batches_have_similar_lengths_and_all_texts():
    import fine_tuning_data as data

    from tfwd.finetune.data.corpus import Encoded

    generator = np.random.default_rng(0)
    ids = [np.ones(length, np.int32) for length in generator.integers(3, 48, 300)]
    part = Encoded(ids, np.zeros(300, np.int32))
    found = data.epoch_batches(part, 1, 0)
    assert sorted(np.concatenate(found).tolist()) == list(range(300))
    assert sorted(map(len, found)) == [12] + [16] * 18
    padded = sum(len(batch) * max(len(ids[number]) for number in batch) for batch in found)
    assert padded < 1.25 * sum(map(len, ids))
    again, other = data.epoch_batches(part, 1, 0), data.epoch_batches(part, 1, 1)
    assert all(map(np.array_equal, found, again))
    assert not all(map(np.array_equal, found, other))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns texts of two tasks, and a tiny pretrained encoder."""
    folder = tmp_path_factory.mktemp("tasks")
    for task in ("trec", "sst2"):
        write_data(folder / task)
    return folder, write_pretrained(tmp_path_factory.mktemp("pretrained") / "tiny")


@pytest.mark.slow
def test_a_reset_run_equals_a_run_in_a_new_process(folders, monkeypatch):
    """Checks that earlier runs do not change a run: weights, Adam, references, draws, schedule."""
    import fine_tuning_data as data
    import fine_tuning_plan as planning
    import fine_tuning_training as training

    monkeypatch.setattr(data, "LENGTH", 10)
    monkeypatch.setattr(training, "EPOCHS", 2)

    def run(method, strength, seed, rate=0.02):
        return planning.Run("final", "tfwd", "trec", method, strength, rate, seed)

    def numbers(line):
        return [line[key] for key in ("train_loss", "valid_loss", "test_loss", "test_accuracy")]

    mixed, decayed = run("Mixout 0.9", 0.9, 1), run("decay towards the start", 2.0, 1)
    used = training.Training(*folders)
    others = [numbers(used(run("Mixout 0.9", 0.5, 2, 0.05))), numbers(used(decayed))]
    again = [numbers(used(mixed)), numbers(used(decayed))]
    assert again[1] == pytest.approx(others[1], rel=1e-5)
    assert again[0] != pytest.approx(others[0], rel=1e-3)
    for one, found in zip((mixed, decayed), again, strict=True):
        assert numbers(training.Training(*folders)(one)) == pytest.approx(found, rel=1e-5)
