"""`tfwd-finetune` in one and in three processes: equal losses, scores and weights.

20 texts in batches of 6: three workers get 2 rows of each batch. The last batch has 2 rows, and one
worker gets none of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from distribute.train_runs import AFTER_TRAINING, assert_same, best_weights, log
from finetune_tools import write_data, write_pretrained
from stack_marks import SLOW_ON_KERAS_2
from watched_processes import Processes, clusters, finish

pytestmark = [*SLOW_ON_KERAS_2, pytest.mark.slow]

CODE = "import sys, tfwd_programs; sys.argv[0] = 'tfwd-finetune'; tfwd_programs.finetune()"
FLAGS = {
    "data.batch_size": 6,
    "data.eval_batch_size": 3,
    "data.max_length": 10,
    "model.pooling": "mean",
    "model.dropout": 0.2,
    "model.attention_dropout": 0.2,
    "model.head_dropout": 0.2,
    "model.mixout": 0.3,
    "optimizer.learning_rate": 0.01,
    "optimizer.layer_decay": 0.9,
    "training.epochs": 3,
    "training.log_steps": 2,
    "training.checkpoint_seconds": 0,
    "training.tensorboard": False,
    "training.deterministic": True,
}


def test_three_workers_fine_tune_as_one_process(tmp_path: Path) -> None:
    pretrained = write_pretrained(tmp_path / "pretrained")
    parts = (("train", 0, 10), ("valid", 3, 4), ("test", 5, 4))
    flags = {"data.path": write_data(tmp_path / "data", parts), "model.pretrained": pretrained}
    config = [f"--config.{key}={value}" for key, value in {**FLAGS, **flags}.items()]
    for count in (1, 3):
        given = ["--config=finetune", f"--workdir={tmp_path / str(count)}", *config]
        with Processes() as processes:
            workers = [
                processes.python(
                    CODE, given, {"TF_CONFIG": json.dumps(cluster)} if count > 1 else {}
                )
                for cluster in clusters(count)
            ]
            ends = [finish(worker) for worker in workers]
        assert [code for code, _ in ends] == [0] * count, ends
    assert_same(log(tmp_path / "1"), log(tmp_path / "3"), AFTER_TRAINING)
    assert_same(best_weights(tmp_path / "1"), best_weights(tmp_path / "3"), AFTER_TRAINING)
    assert len(log(tmp_path / "1")) >= 6 + 3
    one, three = (
        json.loads((tmp_path / name / "report" / "summary.json").read_text("utf-8"))
        for name in ("1", "3")
    )
    assert_same(one["texts"], three["texts"], AFTER_TRAINING)
    assert one["confusion"] == three["confusion"]
