"""Training on Keras 2.15: the steps and backups of `fit`, and the optimizer in a custom loop.

Keras 2 has two kinds of optimizers: new optimizers (`keras.optimizers`) and legacy optimizers. All
optimizers of tensorflow-addons are legacy optimizers. The two kinds create their state and store
their learning rate differently.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer
from keras.optimizers.legacy import Optimizer as LegacyOptimizer
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph

from tfwd._keras2.wrapped_optimizers import Legacy, New, chain, leaves
from tfwd._keras_shared.held_objects import held_by


def steps_per_execution(model: keras.Model) -> int:
    """Returns the number of batches of the next call of the model's training function."""
    return int(model.steps_per_execution.numpy())


def iterator_from(model: keras.Model, data: Any, iterator: Any, steps: int) -> Iterator[Any]:
    """Returns an iterator for the training function that also yields the batch already taken.

    TensorFlow traces a `tf.function` again if its iterator is not over a dataset with the same
    element types. The function's dropout would then start again.

    Args:
        model: Compiled model.
        data: Batch that was taken.
        iterator: Iterator after that batch. It yields the function's other batches.
        steps: Number of batches that the function will take.
    """
    if model.run_eagerly:
        return itertools.chain([data], iterator)
    batches = [data, *itertools.islice(iterator, steps - 1)]
    if isinstance(iterator, tf.data.Iterator):
        return iter(_dataset(batches, iterator.element_spec))
    strategy = model.distribute_strategy
    parts = [part for batch in batches for part in _parts(strategy, batch)]
    spec = tf.nest.map_structure(lambda one: one._value_specs[0], iterator.element_spec)
    return iter(strategy.distribute_datasets_from_function(lambda _: _dataset(parts, spec)))


def train_step(model: keras.Model) -> Callable[[Any], Any]:
    """Returns a model's own training step as a Python function of a batch."""
    own: Any = getattr(model.train_step, "python_function", model.train_step)

    def step(data: Any) -> Any:
        run = own
        if not tf.executing_eagerly():
            enabled = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
            run = autograph.tf_convert(own, enabled)
        logs = run(data)
        model._train_counter.assign_add(1)
        return logs

    return step


_FUNCTIONS = ("train_function", "train_tf_function", "test_function", "predict_function")


def functions(model: Any) -> list[str]:
    """Returns the attributes that hold a function that `fit` or another method has created."""
    return [name for name in _FUNCTIONS if vars(model).get(name) is not None]


def forget_functions(model: Any) -> None:
    """Lets `fit`, `evaluate` and `predict` of a model trace their functions again."""
    for name in functions(model):
        setattr(model, name, None)


def optimizers(model: keras.Model) -> list[Any]:
    """Returns the optimizers that a model holds, also in lists and dicts.

    Optimizers inside other optimizers are left out.
    """
    found = [x for x in held_by(model) if isinstance(x, (New, Legacy))]
    return list({id(optimizer): optimizer for optimizer in found}.values())


def batch(data: Any) -> Any:
    """Returns a batch of `fit`'s data."""
    return data


def _parts(strategy: tf.distribute.Strategy, batch: Any) -> list[Any]:
    """Returns each replica's part of a batch."""
    leaves = [strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(batch)]
    return [tf.nest.pack_sequence_as(batch, part) for part in zip(*leaves, strict=True)]


def _dataset(elements: list[Any], spec: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(lambda: iter(elements), output_signature=spec)


# With these arguments a backup still exists after `fit`. It also survives a crash during writing,
# because TensorFlow registers a checkpoint only after the checkpoint is complete.
BACKUP_ARGUMENTS: dict[str, Any] = {"delete_checkpoint": False}


def epochs_in_backup(callback: keras.callbacks.BackupAndRestore) -> int:
    """Returns the number of epochs in the backup from which training resumed."""
    return int(callback._training_state._ckpt_saved_epoch.numpy()) + 1


def extend_backups(state_of: Any, restore: Any) -> None:
    """Does nothing. `BackupAndRestore` of Keras 2 makes a `tf.train.Checkpoint` of the model."""


def is_compiled(model: keras.Model) -> bool:
    """Returns True if a model has an optimizer and a loss. Returns False for other objects."""
    return getattr(model, "_is_compiled", False)


def can_back_up(model: keras.Model) -> bool:
    """Returns True, because `BackupAndRestore` of Keras 2 also accepts a model without weights."""
    return True


_LossScale: Any = keras.mixed_precision.LossScaleOptimizer

# The optimizers of tensorflow-addons that do not wrap another optimizer.
ADDONS = (
    "AdaBelief",
    "COCOB",
    "ConditionalGradient",
    "LAMB",
    "LazyAdam",
    "NovoGrad",
    "RectifiedAdam",
    "Yogi",
)


def optimizer_names() -> list[str]:
    """Returns the names of the available optimizers."""
    found = [
        name
        for name, kind in vars(keras.optimizers).items()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and name != "Optimizer"
    ]
    if importlib.util.find_spec("tensorflow_addons") is not None:
        found += [f"tfa.{name}" for name in ADDONS]
    return found


def optimizer_class(name: str) -> type:
    """Returns the optimizer class of a name."""
    if not name.startswith("tfa."):
        return getattr(keras.optimizers, name)
    with warnings.catch_warnings():  # ignore the warning that tensorflow-addons is deprecated
        warnings.simplefilter("ignore")
        import tensorflow_addons
    return getattr(tensorflow_addons.optimizers, name.removeprefix("tfa."))


def with_loss_scale(optimizer: Any) -> Any:
    """Returns the optimizer inside a dynamic loss scale, for float16."""
    return _LossScale(optimizer)


def scales_loss(optimizer: Any) -> bool:
    """Returns True if the loss must be scaled before the gradients are computed."""
    return isinstance(optimizer, _LossScale)


def scale_loss(optimizer: Any, loss: tf.Tensor) -> tf.Tensor:
    """Returns the loss times the optimizer's scale."""
    return optimizer.get_scaled_loss(loss)


def loss_scale(optimizer: Any) -> tf.Tensor:
    """Returns the scale of an optimizer that scales the loss."""
    return optimizer.loss_scale


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Creates the optimizer's state for the variables."""
    if isinstance(optimizer, LegacyOptimizer) and not hasattr(optimizer, "build"):
        optimizer._create_all_weights(list(variables))
    else:
        optimizer.build(list(variables))


def optimizer_state(optimizer: Any) -> list[Any]:
    """Returns the own variables of the optimizer and of all optimizers inside that exist so far.

    Lookahead, SWA and MovingAverage of tensorflow-addons do not list the variables of the optimizer
    inside.
    """
    found: dict[int, Any] = {}
    for held in chain(optimizer):
        variables = held.variables
        for variable in variables() if callable(variables) else variables:
            found[id(variable)] = variable
    return list(found.values())


def set_learning_rate(optimizer: Any, rate: tf.Tensor) -> None:
    """Assigns the learning rate of the next step. Skips an optimizer without one, such as COCOB."""
    for leaf in leaves(optimizer):
        if not isinstance(leaf, LegacyOptimizer):
            leaf.learning_rate.assign(rate)
        elif "learning_rate" in leaf._hyper:
            leaf._create_hypers()
            leaf._hyper["learning_rate"].assign(rate)


def make_step(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Makes one step.

    Args:
        optimizer: Optimizer that is built for the variables.
        gradients: List as long as `variables`, with None for a missing gradient. If the optimizer
            scales the loss, these are gradients of the scaled loss.
        variables: Variables that the optimizer was built for.
    """
    if scales_loss(optimizer):
        gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(_reached(gradients, variables))
    elif hasattr(optimizer, "apply"):  # an optimizer of tfwd, which also gets missing gradients
        optimizer.apply(gradients, variables)
    else:
        optimizer.apply_gradients(_reached(gradients, variables))


def _reached(gradients: Sequence[Any], variables: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Returns the pairs that have a gradient. Keras would warn of other pairs in every trace."""
    pairs = zip(gradients, variables, strict=True)
    return [(gradient, variable) for gradient, variable in pairs if gradient is not None]


def replace_traced_function(model: Any, function: Any) -> Any:
    """Replaces the traced training function of a model, and returns it.

    The callback `TensorBoard` of Keras 2 writes its graph. None writes no graph.
    """
    before = model.train_tf_function
    model.train_tf_function = function
    return before


def build_compiled_metrics(model: Any, batch: Any) -> None:
    """Does nothing: Keras 2 leaves out the results of metrics that are not built."""
