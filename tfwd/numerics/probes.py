"""`Probes`: checks the tensors of a step in a custom training loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfwd import _keras
from tfwd.numerics.bad_step_report import Report
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.likely_causes import likely_causes
from tfwd.numerics.checked_tensors import Frame
from tfwd.numerics.layers_by_pattern import Patterns
from tfwd.numerics.step_watch import Watch
from tfwd.numerics.tensor_measurements import PACKED, Measurement, packed, unpacked

_KINDS = {
    "inputs": ("argument", "input"),
    "outputs": ("pre-activation", "output"),
    "weights": ("weight",),
    "gradients": ("gradient", "weight gradient"),
}


_here = threading.local()  # its attribute `open` is the name of the model whose probes are open


class Probes:
    """Probes of layers' inputs and outputs, weights and gradients in a custom training loop.

    Inside `with probes:`, each tensor of the model is measured while the step runs. This works in
    eager mode, in a `tf.function` and under XLA. `report()` returns the measurements of the last
    checked step, forward and backward, in the order of computation. For each tensor it has the
    counts of NaN, +Inf and -Inf, and the smallest and largest finite elements. The step does not
    change: no draw, no weight and no result, except for last bits under XLA and of second
    derivatives. After the `with` block the model is unchanged. Saved models do not contain the
    probes.

    Open the probes where the step is traced: inside the function, around the model's call and the
    tape's `gradient`. With replicas, open them in the function that `strategy.run` calls. You can
    also open them around the first call of a `tf.function`. That call traces the function, and each
    later call is checked too.

    Args:
        model: a built model or layer.
        every_n_steps: int. Check one step in every N, starting with the first. Default 1.
        inputs: bool. Checks the inputs of the model. Default True.
        outputs: bool. Checks the outputs of layers, and the inputs of a relu, which may hide NaN.
            Default True.
        weights: bool. Checks the weights before the step. Default True.
        gradients: bool. Checks the gradients of layers' outputs and of weights. Default True.
        include: regular expression, or a list of them, of layers and weights to check. A pattern
            must match the full path or its last components. Default None, for all.
        exclude: regular expression, or a list of them, of layers and weights to ignore. Default
            None.

    Raises:
        TypeError: If `model` is not a Keras model or layer.
        ValueError: If the model is not built; if `every_n_steps` is not a whole number of at least
            1; if all kinds of tensors are switched off; if a pattern is not a regular expression,
            or matches no layer and no weight.
        RuntimeError: In `with`, if these or other probes are already open in the thread.

    Example:
    >>> import keras, tensorflow as tf
    >>> from tfwd.numerics import Probes
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="score")])
    >>> probes = Probes(model, weights=False)
    >>> @tf.function
    ... def step(x):
    ...     with probes:
    ...         with tf.GradientTape() as tape:
    ...             loss = tf.reduce_mean(tf.math.log(model(x) * 0.0))
    ...         return tape.gradient(loss, model.trainable_variables[0])
    >>> _ = step(tf.ones([4, 2]))
    >>> print(probes.report().sentence)
    loss: -Inf, step 1

    References: Hugging Face's `DebugUnderflowOverflow`, which checks forward; Caffe's `debug_info`.
    """

    def __init__(
        self,
        model: keras.layers.Layer,
        every_n_steps: int = 1,
        inputs: bool = True,
        outputs: bool = True,
        weights: bool = True,
        gradients: bool = True,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
    ):
        is_int = isinstance(every_n_steps, int) and not isinstance(every_n_steps, bool)
        if not is_int or every_n_steps < 1:
            raise ValueError(
                f"Probes: every_n_steps={every_n_steps!r}: give a whole number of at least 1"
            )
        if not isinstance(model, keras.layers.Layer):
            raise TypeError(f"Probes: model={model!r}: give a Keras model or layer")
        if not model.built:
            raise ValueError(
                f"Probes: model '{model.name}' is not built, so its layers are not known yet: call "
                "it on a batch first"
            )
        asked = {
            "inputs": inputs,
            "outputs": outputs,
            "weights": weights,
            "gradients": gradients,
        }
        if not any(asked.values()):
            raise ValueError(f"Probes: {', '.join(asked)} are all False: set at least one to True")
        self.model, self.every_n_steps = model, every_n_steps
        self._kinds = [kind for name, on in asked.items() if on for kind in _KINDS[name]]
        self._patterns = Patterns("Probes", include, exclude)
        self._patterns.check(model)
        self._local = threading.local()
        self._passes: list[_Pass] = []
        self._clocks: dict[int, Any] = {}  # by replica, the number of steps

    def __enter__(self) -> Probes:
        if getattr(self._local, "open", None) is not None:
            raise RuntimeError(
                "Probes: these probes are already open in this thread: close the outer `with` block"
            )
        if getattr(_here, "open", None) is not None:
            raise RuntimeError(
                f"Probes: the probes of model '{_here.open}' are open in this thread, and only one "
                "can measure: give Probes a model that contains both models, or close the outer "
                "`with` block"
            )
        watch = _ProbingWatch(self)
        self._local.open = watch.open()
        self._local.open.__enter__()
        _here.open = self.model.name
        return self

    def __exit__(self, *exception: Any) -> None:
        opened, self._local.open, _here.open = self._local.open, None, None
        opened.__exit__(*exception)

    def report(self, history: Sequence[Mapping[str, float]] = ()) -> Report:
        """Returns the report on the last checked step.

        Args:
            history: a list with a dict for each earlier step, from any name to the norm of a
                gradient. The name "step" is for the step's number. Without it, the steps follow one
                another. The history helps to find the likely cause. Default (), for none.

        Returns:
            A `Report`. If everything was finite, its table has all tensors and their ranges. With
            several replicas, it is the report of the replica whose first non-finite tensor comes
            earliest. If all tensors are finite, it is the report of the first replica.

        Raises:
            RuntimeError: If no step was checked.
        """
        last: dict[int, tuple[int, _Pass]] = {}
        for one in self._passes:
            step = int(one.step.numpy())
            if step > last.get(one.replica, (0, one))[0]:
                last[one.replica] = step, one
        if not last:
            raise RuntimeError(
                "Probes: no step was checked: put `with probes:` around the model's call and "
                "tape.gradient, inside the traced function, or around its first call"
            )
        reports = []
        for replica in sorted(last):
            step, one = last[replica]
            found = [
                Measurement(frame, unpacked(numbers.numpy()))
                for frame, numbers in zip(one.frames, one.numbers, strict=True)
            ]
            reports.append(Report(step, found, (), replica if len(last) > 1 else None))
        report = min(reports, key=_place_of_first)
        evidence = Evidence(report.found, {}, [], history, self.model, "", None)
        report.causes = likely_causes(evidence)
        kinds = {one.frame.kind for one in report.found}
        if "gradient" in self._kinds and not kinds & {"gradient", "weight gradient"}:
            report.note = (
                "No gradient was checked: tape.gradient was not called, or was called outside of "
                "`with probes:`."
            )
        return report

    def _is_requested(self, frame: Frame) -> bool:
        if frame.kind == "loss":
            return True
        return frame.kind in self._kinds and self._patterns.choose(frame.name)

    def _begin(self) -> _Pass:
        """Starts a step in this thread: for each eager step, and once for each traced graph."""
        replica = _replica()
        if replica not in self._clocks:
            self._clocks[replica] = _variable(tf.int64, [])
        clock = self._clocks[replica].assign_add(1)
        due = (clock - 1) % self.every_n_steps == 0
        begun = _Pass(replica, due, _variable(tf.int64, []), [], [])
        begun.step.assign(tf.where(due, clock, begun.step))
        if not tf.executing_eagerly():
            self._passes.append(begun)
        elif due:
            self._passes = [one for one in self._passes if one.replica != replica] + [begun]
        return begun


class _Pass(NamedTuple):
    """Traced step on a replica.

    Attributes:
        replica: int. The replica's number.
        due: bool tensor. True if the step is checked.
        step: variable with the number of the last checked step.
        frames: the checked tensors.
        numbers: for each frame, a variable with its `packed` measurement.
    """

    replica: int
    due: tf.Tensor
    step: Any
    frames: list[Frame]
    numbers: list[Any]


class _ProbingWatch(Watch):
    """`Watch` whose step starts with the first call of the model, in any graph."""

    def __init__(self, probes: Probes):
        super().__init__(
            probes.model,
            self._measure_tensor,
            ignores=lambda frame: not probes._is_requested(frame),
        )
        self._probes = probes
        self._pass: _Pass | None = None

    def _call(
        self, cls: type, layer: Any, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        outermost = layer is self.model and _keras.calls_of(type(layer)) is cls
        inside = self._open or self._leaf or self._backward
        if outermost and not inside and (self._pass is None or not self.is_in_watched_graph()):
            self._graph = _keras.present_graph()
            self._pass = self._probes._begin()
            self._losses = 0
            for variable in _keras.variables.weights(self.model):
                path = _keras.variables.path(variable)
                self.check("weight", path, _keras.variables.value(variable))
        return super()._call(cls, layer, own, args, kwargs)

    def _may_be_trained(self, call: tuple[str, int]) -> bool:
        """Returns True, because probes also measure gradients that reach no weight."""
        return True

    def _sequence(self, *args: Any) -> None:
        return None  # the base class would run the layer again

    def _after_gradient(self, sources: Any, found: Any) -> None:
        super()._after_gradient(sources, found)
        known = {
            id(_keras.variables.tf_variable(v)): _keras.variables.path(v)
            for v in _keras.variables.trainable_variables(self.model)
        }
        for source, gradient in zip(tf.nest.flatten(sources), tf.nest.flatten(found), strict=True):
            path = known.get(id(_keras.variables.tf_variable(source)))
            if path is not None:
                self.check("weight gradient", path, gradient)

    def _measure_tensor(self, frame: Frame, tensor: Any, sequence: Any) -> None:
        current = self._pass
        if current is None:
            return
        if tf.executing_eagerly() and not current.due:
            return
        numbers = _variable(tf.float64, [PACKED])
        current.frames.append(frame)
        current.numbers.append(numbers)

        def measure() -> tf.Tensor:
            numbers.assign(packed(tensor, sequence))
            return tf.constant(True)

        if self._probes.every_n_steps == 1:
            measure()
        else:
            tf.cond(current.due, measure, lambda: tf.constant(False))


def _place_of_first(report: Report) -> int:
    first = report.first
    return len(report.found) if first is None else report.found.index(first)


def _replica() -> int:
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    number = context.replica_id_in_sync_group
    return int(tf.get_static_value(number) or 0) if isinstance(number, tf.Tensor) else number


def _variable(dtype: tf.DType, shape: list[int]) -> Any:
    """Creates a variable of one replica, eagerly or while a function is traced."""
    with tf.init_scope():
        return ResourceVariable(tf.zeros(shape, dtype), trainable=False, dtype=dtype)
