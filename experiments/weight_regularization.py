"""Effect of weight dropout and variational noise on a language model's perplexity.

    python experiments/weight_regularization.py --data=FOLDER

One model and one budget, four ways to regularize the recurrent kernels, several seeds each. FOLDER
has train.txt, valid.txt and test.txt. Output: a table in Markdown, a plot, and one line of
JSON.
"""

from __future__ import annotations

from typing import Any

import language_model_experiment


def rates(dropout: float, noise: float) -> dict[str, Any]:
    """Returns the flags of one kind of run."""
    return {"model.weight_dropout": dropout, "model.variational_noise": noise}


EXPERIMENT = language_model_experiment.Experiment(
    name="weight_regularization",
    config="configs/wikitext2_small.py",
    variants={
        "neither": rates(0.0, 0.0),
        "weight dropout 0.5": rates(0.5, 0.0),
        "variational noise 0.05": rates(0.0, 0.05),
        "both": rates(0.5, 0.05),
    },
    baseline="neither",
    column="recurrent kernels",
)

if __name__ == "__main__":
    language_model_experiment.answer(EXPERIMENT, (__doc__ or "").splitlines()[0])
