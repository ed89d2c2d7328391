"""Defects of optimizers and of the moments of gradients."""

from __future__ import annotations

from mutations.defects.defect import Defect

DECAY = ("tests/optimizers/test_decoupled_weight_decay.py",)
AVERAGE = ("tests/optimizers/test_non_monotonic_asgd.py",)
RULES = "tests/gradients/test_rules.py"

DEFECTS = [
    Defect(
        "the decay comes after the step",
        "optimizers/decoupled_weight_decay.py",
        """                done = decay(variable, fraction, self._start(variable))
            with update_interception.waiting_for(leaf, done):
                own(gradient, variable, rate)
""",
        """                own(gradient, variable, rate)
                decay(variable, fraction, self._start(variable))
                return
            with update_interception.waiting_for(leaf, done):
                own(gradient, variable, rate)
""",
        DECAY,
    ),
    Defect(
        "a variable that is twice in the list is decayed twice",
        "optimizers/decoupled_weight_decay.py",
        "if first(variable) else None",
        "if first(variable) or True else None",
        DECAY,
    ),
    Defect(
        "the schedule of the decay is a step behind",
        "optimizers/_updates/decay_rate.py",
        "decay = decay(update_interception.schedule_step(leaf))",
        "decay = decay(update_interception.schedule_step(leaf) - 1)",
        DECAY,
    ),
    Defect(
        "NonMonotonicASGD compares with one evaluation too many",
        "optimizers/non_monotonic_asgd.py",
        "float(recent[0])",
        "float(recent[min(1, len(recent) - 1)])",
        AVERAGE,
    ),
    Defect(
        "the average of NonMonotonicASGD has no last step",
        "optimizers/non_monotonic_asgd.py",
        "share = tf.cast(1 / count, average.dtype)",
        "share = tf.cast(1 / (count + 1), average.dtype)",
        AVERAGE,
    ),
    Defect(
        "the squared moment of a dropped weight is not masked",
        "tfwd/gradients/shared_weights.py",
        "first, second = scale * first, scale * scale * second",
        "first, second = scale * first, second",
        ("tests/gradients/test_effective_weights.py",),
    ),
    Defect(
        "a parametrization with a call of its own is elementwise because its base class is",
        "tfwd/parametrizations/base.py",
        "cls.elementwise = False",
        "pass",
        ("tests/gradients/test_effective_weights.py", "-k", "users_own"),
    ),
    Defect(
        "a kernel's gradients are squared before they are summed over positions",
        "tfwd/gradients/gradient_forms.py",
        "[1.0 if p == q else 2.0 for",
        "[1.0 if p == q else 0.0 for",
        (RULES, "-k", "einsum"),
    ),
    Defect(
        "the gradients of two uses of one weight are squared separately",
        "tfwd/gradients/shared_weights.py",
        "squares = squares + product",
        "pass",
        (RULES, "-k", "tied_embedding or used_twice"),
    ),
]
