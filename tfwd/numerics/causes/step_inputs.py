"""Causes that exist before the model computes: data, labels, weights, learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfwd import _keras
from tfwd._keras import losses as _keras_losses
from tfwd.numerics.bad_step_report import Cause, describe
from tfwd.numerics.causes.class_weights import weighted_classes
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.losses_by_output import outputs
from tfwd.numerics.tensor_measurements import Measurement, positions_text, rows_text


def data(evidence: Evidence) -> Iterator[Cause]:
    """Checks for NaN or infinities in the batch."""
    for one in evidence.bad("data"):
        detail, name = one.detail, one.frame.name
        what = "labels" if name.startswith("y") else "input" if name.startswith("x") else name
        where = rows_text(detail.rows) if detail.rows.size else "a scalar"
        array = evidence.data.get(name, np.zeros(0))
        places = np.argwhere(~np.isfinite(array)) if array.ndim > 2 else np.zeros([0, 0])
        if len(places):  # in an image, or in a sequence of vectors
            place = ", ".join(map(str, places[0]))
            where += f", {'first ' * (len(places) > 1)}at [{place}]"
        elif detail.columns.size:
            some = "columns" if detail.columns.sum() > 1 else "column"
            where += f", {some} {positions_text(detail.columns)}"
        classes = weighted_classes(evidence, name, ~np.isfinite(array))
        if classes:
            yield Cause(
                "NaN or infinity in the class_weight",
                f"'{name}' has {detail.summary}: in all examples of class {classes}, and in no "
                "others. Keras computes such sample weights from class_weight.",
                "check the class_weight of fit (a class without examples gives 1/0), or the "
                "sample weights of the data.",
            )
            continue
        yield _non_finite(
            what,
            f"'{name}' has {detail.summary} in {where}.",
            "find these examples in the data; remove them, or replace the values before training "
            "(numpy.nan_to_num), and check how the values were made"
            f"{', and the class_weight of fit' * name.startswith('sample_weight')}.",
        )


def _non_finite(what: str, evidence: str, advice: str) -> Cause:
    return Cause(f"NaN or infinity in the {what}", evidence, advice)


def inputs_of_first_layer(evidence: Evidence) -> Iterator[Cause]:
    """Checks the inputs of the first layer, if the batch is not known, as for `Probes`."""
    first = evidence.first
    before = evidence.found[: evidence.found.index(first)]
    has_run = any(one.frame.kind in ("output", "pre-activation") for one in before)
    if evidence.data or first.frame.kind != "input" or has_run:
        return
    yield _non_finite(
        "input",
        f"The first layer, '{first.frame.name}', takes {first.detail.summary}.",
        "check the batch that the model is called on, and the code of the model before this layer.",
    )


def empty(evidence: Evidence) -> Iterator[Cause]:
    """Checks for a batch without examples, as a replica gets from a short last batch."""
    names = [name for name, values in evidence.data.items() if values.ndim and not len(values)]
    if names:
        yield Cause(
            "a batch without examples",
            f"{' and '.join(map(repr, names[:3]))} {'have' if names[1:] else 'has'} no examples. "
            "The mean over no examples is 0/0. With several replicas, a short last batch leaves "
            "replicas without examples.",
            "drop the last batch (drop_remainder=True of tf.data.Dataset.batch), or choose a batch "
            "size whose last batch has an example for each replica.",
        )


def weights(evidence: Evidence) -> Iterator[Cause]:
    """Checks for weights that were not finite before the step."""
    bad = evidence.bad("weight")
    if not bad:
        return
    names = ", ".join(f"'{one.frame.name}'" for one in bad[:3])
    more = f" and {len(bad) - 3} others" if len(bad) > 3 else ""
    when = {
        True: "This is the first step of this training, and the model was trained before: the "
        "values came from earlier steps or from a file."
        if evidence.was_trained()
        else "This is the first step of the training: the values came from a file or an "
        "initializer.",
        False: "They were finite before the previous update. It or other code "
        "since then has changed them.",
        None: "They were not finite at the start, or an unchecked step changed them: check each "
        "step (every_n_steps=1).",
    }[evidence.is_first]
    trained = {
        _keras.variables.path(v) for v in _keras.variables.trainable_variables(evidence.model)
    }
    if evidence.is_first is False and any(one.frame.name not in trained for one in bad):
        when = "A layer or other code changed them: steps check only trainable weights."
    yield Cause(
        "weights that are not finite already",
        f"{names}{more} {'are' if bad[1:] else 'is'} not finite before the step. {when}",
        _advice_on_weights(evidence, bad),
    )


def _advice_on_weights(evidence: Evidence, bad: list[Measurement]) -> str:
    """Returns the advice on weights, or on variables of the optimizer, that are not finite."""
    weights = {
        _keras.variables.path(variable) for variable in _keras.variables.weights(evidence.model)
    }
    if any(one.frame.name in weights for one in bad):
        trained = {
            _keras.variables.path(v) for v in _keras.variables.trainable_variables(evidence.model)
        }
        if all(one.frame.name not in trained and not one.detail.summary.nan for one in bad):
            paths = ", ".join(f"'{one.frame.name.partition('/')[2]}'" for one in bad[:3])
            return (
                "load an earlier checkpoint. If a layer's state is infinite on purpose, as a mask "
                f"or a running minimum, leave it out of the check: exclude=[{paths}]."
            )
        return "load an earlier checkpoint, and test each file with numpy.isfinite before training."
    return (
        "call compile() with a new optimizer, or load the optimizer's variables of an earlier "
        "checkpoint too: set_weights() of a model does not change them."
    )


def arguments(evidence: Evidence) -> Iterator[Cause]:
    """Checks for ids, masks and lengths that a layer refuses. XLA removes the layer's error."""
    for one in evidence.bad("argument")[:3]:
        yield Cause(
            "an argument that a layer refuses",
            f"{describe(one)[0].upper()}{describe(one)[1:]}. Without jit_compile the layer raises "
            "an error. XLA removes such errors: the layer's output is NaN instead.",
            "check how the batch is made. Ids must come from the tokenizer of this model. A mask "
            "must be 1 where there is text and 0 where there is padding. Longer texts must be "
            "truncated.",
        )


def learning_rate(evidence: Evidence) -> Iterator[Cause]:
    """Checks for a learning rate that is not finite or negative."""
    for one in evidence.bad("learning rate"):
        value = f"{one.detail.low:.6g}" if one.detail.summary.non_finite == 0 else "not finite"
        yield Cause(
            "a learning rate that is not finite or negative",
            f"The learning rate of this step is {value}{_iterations(evidence)}.",
            "check the schedule for a division by a number of steps that is 0, a root or a "
            "logarithm of a negative number, or a decay below 0. (A skipped step does not "
            "advance the optimizer's iterations.)",
        )
        return


def labels(evidence: Evidence) -> Iterator[Cause]:
    """Checks for labels that are not a class of the model."""
    for one in outputs(evidence):
        values = evidence.data.get(one.label)
        if values is None or not _is_sparse_loss(one.loss):
            continue
        if not np.issubdtype(values.dtype, np.number):
            continue
        classes = one.prediction.detail.width
        outside = (values < 0) | (values >= classes)
        ignored = _keras_losses.ignored_class(one.loss)
        if ignored is not None:
            outside &= values != ignored
        if outside.any():
            rows = outside.reshape(len(values), -1).any(1) if values.ndim else outside
            wrong = sorted({int(v) for v in values[outside].ravel()})[:5]
            what = f"output '{one.name}'" if one.name else "the model"
            yield Cause(
                "a label out of range",
                f"'{one.label}' has the label{'s' * (len(wrong) > 1)} "
                f"{', '.join(map(str, wrong))} in {rows_text(rows)}, "
                f"and {what} has {classes} class{'es' * (classes > 1)}, 0 to {classes - 1}.",
                "number the labels from 0, or give the last layer as many units as there are "
                "labels.",
            )


def _is_sparse_loss(loss: Any) -> bool:
    """Returns True for Keras's cross-entropy of class numbers. Other losses may allow any label."""
    found = keras.losses.get(loss) if isinstance(loss, str) else loss
    kind = keras.losses.SparseCategoricalCrossentropy
    if isinstance(found, kind):
        return _keras.is_of_keras(type(found), "call")
    return found is keras.losses.sparse_categorical_crossentropy


def _iterations(evidence: Evidence) -> str:
    """Returns the optimizer's iterations, which schedules get, as text."""
    found = evidence.iterations()
    return f", for iterations = {', '.join(map(str, sorted(found)))}" if found else ""
