"""Losses, labels and predictions of each output of a model."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd._keras import losses as _keras_losses
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.tensor_measurements import Measurement


class Output(NamedTuple):
    """Output of a model, if the output has a loss.

    Attributes:
        name: str. The output's name; empty if the model has only one output.
        loss: the output's loss, as given to `compile`.
        label: str. The name of the output's labels in the batch.
        prediction: the measurement of the output.
    """

    name: str
    loss: Any
    label: str
    prediction: Measurement


def loss_name(loss: Any) -> str:
    """Returns the name of a loss or of its function.

    A loss object without a name gets the name of its class in snake case, as in Keras 3.
    """
    if isinstance(loss, str):
        return loss
    if isinstance(loss, functools.partial):
        return loss_name(loss.func)
    given = getattr(loss, "name", None) or getattr(loss, "__name__", None)
    if given:
        return str(given)
    words = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", type(loss).__name__)
    return re.sub("([a-z])([A-Z])", r"\1_\2", words).lower()


def outputs(evidence: Evidence) -> list[Output]:
    """Returns the outputs with a loss; none if the loss or labels of an output are unclear."""
    if not isinstance(evidence.model, keras.Model):
        return []
    loss = _keras_losses.compiled_loss(evidence.model)[0]
    predictions = list(evidence.predictions)
    if loss is None or not predictions:
        return []
    if len(predictions) == 1:
        losses = [one for one in tf.nest.flatten(loss) if one is not None]
        labels = [name for name in evidence.data if name.startswith("y")]
        if len(losses) != 1 or len(labels) != 1:
            return []
        return [Output("", losses[0], labels[0], predictions[0])]
    names = list(getattr(evidence.model, "output_names", None) or [])
    found = []
    for i, one in enumerate(predictions):
        place = one.frame.name.removeprefix("y_pred")  # as "[0]" or "['name']"
        key = place[2:-2] if place.startswith("['") else names[i] if i < len(names) else ""
        index = names.index(key) if key in names else i
        own = _of_output(loss, key, index)
        candidates = (f"y{place}", f"y[{key!r}]", f"y[{index}]")
        label = next((name for name in candidates if name in evidence.data), None)
        if own is not None and label is not None and not tf.nest.is_nested(own):
            found.append(Output(key or str(index), own, label, one))
    return found


def _of_output(loss: Any, key: str, index: int) -> Any:
    if isinstance(loss, dict):
        return loss.get(key)
    if isinstance(loss, (list, tuple)):
        return loss[index] if index < len(loss) else None
    return loss


def of_output(evidence: Evidence, output: Output) -> Evidence:
    """Returns the evidence of a step without the labels and predictions of other outputs."""
    data = {
        name: values
        for name, values in evidence.data.items()
        if not name.startswith("y") or name == output.label
    }
    return evidence._replace(
        data=data,
        predictions=[output.prediction],
        loss=loss_name(output.loss),
        function=output.loss,
        output=output.name,
    )
