"""Losses, labels and predictions of each output of a model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras
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
        sample_weight: str. The name of the output's sample weights in the batch, or "".
        loss_weight: float. The output's number in the `loss_weights` of `compile`; 1 without it.
    """

    name: str
    loss: Any
    label: str
    prediction: Measurement
    sample_weight: str
    loss_weight: float


def loss_name(loss: Any) -> str:
    """Returns the name of a loss or of its function.

    A loss object without a name gets the name of its class, as in Keras 3.
    """
    if isinstance(loss, str):
        return loss
    if isinstance(loss, functools.partial):
        return loss_name(loss.func)
    given = getattr(loss, "name", None) or getattr(loss, "__name__", None)
    return str(given) if given else _keras_losses.default_name(loss)


def keras_name(evidence: Evidence) -> str:
    """Returns the name of the class or function of Keras's own loss; "" for any other loss.

    "" is also returned for the losses of several outputs, and for a loss that a custom training
    step computes. Keras's own losses add a small number to their divisors.
    """
    if not isinstance(evidence.model, keras.Model) or not evidence.predictions:
        return ""
    loss = evidence.function
    if loss is None:
        loss = _keras_losses.compiled_loss(evidence.model)[0]
    losses = [one for one in tf.nest.flatten(loss) if one is not None]
    if len(losses) != 1:
        return ""
    found = keras.losses.get(losses[0])
    own = type(found) if isinstance(found, keras.losses.Loss) else found
    is_own = hasattr(own, "__module__") and _keras.is_of_keras(own)
    return str(getattr(own, "__name__", "")) if is_own else ""


def outputs(evidence: Evidence) -> list[Output]:
    """Returns the outputs with a loss; none if the loss or labels of an output are unclear."""
    if not isinstance(evidence.model, keras.Model):
        return []
    loss, weights = _keras_losses.compiled_loss(evidence.model)
    predictions = list(evidence.predictions)
    if loss is None or not predictions:
        return []
    if len(predictions) == 1:
        losses = [one for one in tf.nest.flatten(loss) if one is not None]
        labels = [name for name in evidence.data if name.startswith("y")]
        if len(losses) != 1 or len(labels) != 1:
            return []
        samples = "sample_weight" if "sample_weight" in evidence.data else ""
        weight = _loss_weight(tf.nest.flatten(weights), "", 0)
        return [Output("", losses[0], labels[0], predictions[0], samples, weight)]
    names = list(getattr(evidence.model, "output_names", None) or [])
    found = []
    for i, one in enumerate(predictions):
        place = one.frame.name.removeprefix("y_pred")  # as "[0]" or "['name']"
        key = place[2:-2] if place.startswith("['") else names[i] if i < len(names) else ""
        index = names.index(key) if key in names else i
        own = _of_output(loss, key, index)
        ends = (place, f"[{key!r}]", f"[{index}]")
        label = _first_name(evidence.data, "y", ends)
        if own is not None and label and not tf.nest.is_nested(own):
            samples = _first_name(evidence.data, "sample_weight", (*ends, ""))
            weight = _loss_weight(weights, key, index)
            found.append(Output(key or str(index), own, label, one, samples, weight))
    return found


def _first_name(data: Mapping[str, Any], start: str, ends: tuple[str, ...]) -> str:
    """Returns the first name of a tensor in the batch; "" if the batch has no such tensor."""
    return next((start + end for end in ends if start + end in data), "")


def _loss_weight(weights: Any, key: str, index: int) -> float:
    """Returns an output's number in `loss_weights`, or 1."""
    found = _of_output(weights, key, index)
    return float(found) if isinstance(found, Real) else 1.0


def _of_output(loss: Any, key: str, index: int) -> Any:
    if isinstance(loss, dict):
        return loss.get(key)
    if isinstance(loss, (list, tuple)):
        return loss[index] if index < len(loss) else None
    return loss


def of_single_output(evidence: Evidence) -> Evidence | None:
    """Returns the evidence of the only output; None if there are several, or the loss is unknown.

    Evidence that is about one of several outputs is returned unchanged.
    """
    if evidence.function is not None:
        return evidence
    found = outputs(evidence)
    return of_output(evidence, found[0]) if len(evidence.predictions) == len(found) == 1 else None


def of_output(evidence: Evidence, output: Output) -> Evidence:
    """Returns the evidence of a step without the tensors that other outputs' losses take."""
    own = (output.label, output.sample_weight)
    data = {
        name: values
        for name, values in evidence.data.items()
        if name in own or not name.startswith(("y", "sample_weight"))
    }
    return evidence._replace(
        data=data,
        predictions=[output.prediction],
        loss=loss_name(output.loss),
        function=output.loss,
        output=output.name,
        loss_weight=output.loss_weight,
    )
