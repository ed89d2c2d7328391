"""Defects of training programs."""

from __future__ import annotations

from mutations.defects.defect import Defect

DEFECTS = [
    Defect(
        "the next window does not continue with the states of the last window",
        "tfwd/runs/training/step.py",
        "self.workers.assign_rows(variable, value)",
        "self.workers.assign_rows(variable, tf.roll(value, 1, 0))",
        ("tests/lm/test_training_step.py", "-k", "state_is_carried"),
    ),
    Defect(
        "the gradients of several workers are summed without their shares",
        "tfwd/runs/training/step.py",
        "objective *= tf.cast(share, objective.dtype)",
        "objective *= 1.0",
        ("tests/distribute/test_train.py", "-k", "as_one_process"),
        slow=True,
    ),
    Defect(
        "each worker draws the masks of the first rows",
        "tfwd/runs/workers/worker_group.py",
        "with global_batch_rows.part_of(start, total):",
        "with global_batch_rows.part_of(0, total):",
        ("tests/distribute/test_train.py", "-k", "as_one_process"),
        slow=True,
    ),
    Defect(
        "a checkpoint has the states of the chief's rows only",
        "tfwd/runs/training/trainer.py",
        "self.workers.collect(tensor for pair in self.state.carried for tensor in pair)",
        "pass",
        ("tests/distribute/test_train.py", "-k", "survives and SIGTERM"),
        slow=True,
    ),
    Defect(
        "a worker is not told that another worker must stop",
        "tfwd/runs/workers/stop_votes.py",
        "if signals.any() and not self._stop:",
        "if False:",
        ("tests/distribute/test_train.py", "-k", "survives and SIGTERM"),
        slow=True,
    ),
    Defect(
        "the gradients of an update stay for the next one",
        "tfwd/runs/training/step.py",
        "                    self._gathered.forget()\n                state.gradient_norm",
        "                    pass\n                state.gradient_norm",
        ("tests/lm/test_steps_per_update.py",),
    ),
    Defect(
        "two workers may have the same number",
        "tfwd/runs/workers/rendezvous.py",
        "if number in self._present:",
        "if False:",
        ("tests/runs/test_rendezvous.py",),
    ),
    Defect(
        "a resumed run begins with states of zero",
        "tfwd/runs/training/trainer.py",
        "self.progress = self._restore(data)",
        """self.progress = self._restore(data)
        for tensor in (t for pair in self.state.carried for t in pair):
            tensor.assign(tf.zeros_like(tensor))""",
        ("tests/lm/test_train.py", "-k", "stop_anywhere"),
    ),
    Defect(
        "the rate is not scaled by the length of the window",
        "tfwd/lm/training_step.py",
        "tf.cast(tf.shape(batch[0])[1], tf.float32) / self.base_window",
        "1.0",
        ("tests/lm/test_training_step.py", "-k", "follows_the_windows"),
    ),
    Defect(
        "a lower layer has a higher rate",
        "tfwd/finetune/learning_rate_schedule.py",
        "below = layers - int(found[1]) if found else 0",
        "below = 1 + int(found[1]) if found else 0",
        ("tests/finetune/test_learning_rate_schedule.py",),
    ),
    Defect(
        "the mean is taken over the padding too",
        "tfwd/finetune/model.py",
        "if mask is None:",
        "if True:",
        ("tests/finetune/test_model.py", "-k", "formula"),
    ),
    Defect(
        "the order of texts does not change from epoch to epoch",
        "tfwd/finetune/data/batches.py",
        "default_rng([seed, epoch])",
        "default_rng([seed, 0])",
        ("tests/finetune/test_model.py", "-k", "batches"),
    ),
    Defect(
        "a run of the fine-tuning experiment begins with what the last one left",
        "experiments/fine_tuning_training.py",
        "variable.assign(tf.zeros_like(variable) if value is None else value)",
        "variable.assign(variable)",
        ("tests/experiments/test_fine_tuning.py", "-k", "reset_run", "-m", ""),
    ),
    Defect(
        "a line that a killed process left incomplete spoils the next one",
        "experiments/fine_tuning_results_file.py",
        'file.truncate(content.rfind(b"\\n") + 1)',
        "pass",
        ("tests/experiments/test_fine_tuning.py", "-k", "loses_the_run"),
    ),
]
