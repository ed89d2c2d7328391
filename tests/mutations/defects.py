"""The defects to plant, each with the tests that must find it."""

from __future__ import annotations

from typing import NamedTuple


class Defect(NamedTuple):
    """A defect.

    Attributes:
        what: the effect of the defect, in words.
        file: path of the source in the repository.
        old: a text that occurs once in the source.
        new: the text that replaces it.
        tests: pytest's arguments, which name the tests that may find it.
        slow: True if a slow test that `.ci/run` names finds it. Otherwise `make test` finds it.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    slow: bool = False


def conformance(file: str, words: str) -> tuple[str, ...]:
    """Returns tests of the table whose names have all the words."""
    return (f"tests/conformance/test_{file}.py", "-k", words)


DRAWN = conformance("draws", "every_training_call and (Dense or BatchNormalization)")
KEPT = conformance("saving", "with_the_draws and Dense and dropout")
DISTRIBUTED = ("tests/test_draws_under_tf_distribute.py",)
DECAY = ("tests/optimizers/test_decoupled_weight_decay.py",)
AVERAGE = ("tests/optimizers/test_non_monotonic_asgd.py",)
RULES = "tests/gradients/test_rules.py"
FINITE = (
    "tests/callbacks/test_finite_check.py",
    "tests/callbacks/test_finite_check_actions.py",
    "tests/callbacks/test_finite_check_restore.py",
    "tests/callbacks/test_finite_check_several_fits.py",
)
BY_HAND = "tests/layers/transformer/test_numpy_encoders.py"
RECURRENCE = ("tests/test_recurrence.py",)
EXAMPLES = ("tests/test_example_masks.py",)
PER_EXAMPLE = "tests/layers/test_per_example.py"
LOCKSTEP = "tfwd/_keras_shared/worker_lockstep.py"
SHARED = ("tests/distribute/test_load.py",)
GAINS = "tests/layers/test_weight_norm_gain.py"

IN_PLACE = "layers/_substitution/in_place/"
LINK = f"{IN_PLACE}layer_call.py"
PARAMETRIZATION = f"{IN_PLACE}parametrization_in_place.py"
INSTALLATION = f"{IN_PLACE}installation.py"
LAYER_KINDS = "tests/in_place/test_layer_kinds.py"
ANNOUNCED = "tests/in_place/test_announced_weights.py"

DEFECTS = [
    # Draws
    Defect(
        "kept entries are not divided by keep",
        "tfwd/_random/dropout_and_noise.py",
        "        return constant(1.0 / keep, dtype)",
        "        return constant(1.0, dtype)",
        conformance("draws", "moments and (Dense or Embedding) and dropout"),
    ),
    Defect(
        "a small mask keeps one entry in 2^16 too few",
        "tfwd/_random/masks_and_normals.py",
        "round(keep * LEVELS) * LEVELS - (1 << 31) - 1",
        "(round(keep * LEVELS) - 1) * LEVELS - (1 << 31) - 1",
        ("tests/test_masks_and_normals.py",),
    ),
    Defect(
        "the weights of a layer are small or large by the first of them",
        "layers/_substitution/substituted_call.py",
        "for target, p in self.targeted\n            if not all",
        "for target, p in self.targeted[:1]\n            if not all",
        ("tests/layers/test_small_weights.py",),
    ),
    Defect(
        "keep is rounded down and not to the nearest",
        "tfwd/_random/masks_and_normals.py",
        "max(round((1.0 - rate) * LEVELS), 1)",
        "max(int((1.0 - rate) * LEVELS), 1)",
        ("tests/test_masks_and_normals.py",),
    ),
    Defect(
        "the gradient of dropout also reaches dropped entries",
        "tfwd/_random/dropout_and_noise.py",
        "return _linear(upstream, keep, late, rows, noise_shape)",
        "return upstream / tf.cast(keep, upstream.dtype)",
        conformance("gradients", "times_mask and Dense and dropout"),
    ),
    Defect(
        "in backward the draw is made too early: its seed does not wait for the gradient",
        "tfwd/_random/dropout_and_noise.py",
        "(late,) = delayed_seeds.seeds_after([seed], [upstream])",
        "late = seed",
        ("tests/test_masks_gradients.py", "tests/test_saved_tensors.py"),
    ),
    Defect(
        "equal elements of a chain draw alike",
        "tfwd/parametrizations/chain.py",
        "seed = seeds.fold_in(seed, 0, index)",
        "seed = link.seed",
        ("tests/test_parametrizations.py",),
    ),
    Defect(
        "the outer wrapper of two is applied first",
        "tfwd/parametrizations/chain.py",
        "for link in chain for pair",
        "for link in reversed(chain) for pair",
        ("tests/layers/test_nested_wrappers.py",),
    ),
    Defect(
        "a chain applies its elements in the opposite order",
        "tfwd/parametrizations/chain.py",
        "for p in self.parametrizations for element in p.elements()",
        "for p in reversed(self.parametrizations) for element in p.elements()",
        conformance("draws", "moments and Dense and patterns"),
    ),
    Defect(
        "all examples of a batch have one mask",
        "tfwd/_random/example_masks.py",
        "parts = [_with_first_axes(tensor, [count, each]) for tensor in (*padded, seeds)]",
        "parts = [_with_first_axes(tensor, [count, each]) for tensor in (*padded, seeds * 0)]",
        EXAMPLES,
    ),
    Defect(
        "backward of a product draws other masks for the kernel's gradient",
        "tfwd/_random/example_masks.py",
        "tf.reduce_sum(dropout_and_noise.drop_entries(products, kept, keep), 0)",
        "tf.reduce_sum(dropout_and_noise.drop_entries(products, ~kept, keep), 0)",
        EXAMPLES,
    ),
    Defect(
        "a tape stores the kernels of examples in eager mode",
        "tfwd/_random/example_masks.py",
        "with private_graph_apis.unrecorded():",
        "if True:",
        ("tests/test_saved_tensors.py", "-k", "eager"),
    ),
    Defect(
        "a mask per example is drawn from the seed of the chain's first element",
        "tfwd/parametrizations/chain.py",
        "seed = seeds.fold_in(link.seed, 0, index) if index else link.seed",
        "seed = link.seed",
        (f"{PER_EXAMPLE}", "-k", "draws_from_the_seed_of_its_place"),
    ),
    Defect(
        "an element after a mask per example is applied before it",
        "tfwd/parametrizations/chain.py",
        "if acts and found is not None:",
        "if False:",
        ("tests/test_parametrizations.py",),
    ),
    Defect(
        "sparse inputs of a layer with masks per example are not rejected before the draw",
        "layers/_substitution/per_example_call.py",
        "if rank is None or _letters(layer, rank) is None:",
        "if False:",
        (PER_EXAMPLE,),
    ),
    Defect(
        "a gain of an outer wrapper gets no gradient in a graph",
        "layers/_substitution/substituted_call.py",
        "for key in filter(wrapper.bound.__contains__, self._raw):",
        "for key in ():",
        (GAINS,),
    ),
    Defect(
        "a gain begins as one and not as the length of the weight",
        "layers/_substitution/trainable_gains.py",
        "return element.first_reference(_keras.variables.value(target.variable))",
        "return tf.ones(shape)",
        (GAINS,),
    ),
    Defect(
        "a gain keeps the length of a weight that is loaded",
        "layers/_substitution/reference_weights.py",
        "if id(gain.weight) in ids and id(gain.value) not in ids:",
        "if False:",
        (GAINS,),
    ),
    Defect(
        "a folded layer has the raw weight",
        "layers/_substitution/copies_with_effective_weights.py",
        "values[positions[id(target.variable)]] = value",
        "pass",
        (GAINS,),
    ),
    Defect(
        "moments of a dropped kernel have the variance of one kept entry",
        "tfwd/dropout_moment_matching.py",
        "stddev = tf.sqrt((1.0 - keep) / keep * squares)",
        "stddev = tf.sqrt((1.0 - keep) * squares)",
        ("tests/test_moment_matching.py",),
    ),
    Defect(
        "combined blocks of draws lose the distance of their means",
        "tfwd/dropout_moment_matching.py",
        "moments[1] + added[1] + count * share * tf.square(distance)",
        "moments[1] + added[1]",
        ("tests/test_moment_matching.py",),
    ),
    Defect(
        "dropout acts in evaluation too, under a tensor flag",
        "tfwd/parametrizations/chain.py",
        "(element.stochastic and not link.training):\n            continue\n        if reference",
        "False:\n            continue\n        if reference",
        conformance("gradients", "changes_nothing and Dense and dropout"),
    ),
    Defect(
        "noise begins a call before start_call",
        "tfwd/parametrizations/gaussian_noise.py",
        "tf.cast(call >= self.start_call, tf.float32)",
        "tf.cast(call + 1 >= self.start_call, tf.float32)",
        ("tests/test_parametrizations.py", "tests/layers/test_variational_noise.py"),
    ),
    # Seeds
    Defect(
        "all replicas draw alike",
        "layers/_substitution/seed_stream.py",
        "replica = 0 if self.share_across_replicas else seeds.replica_id()",
        "replica = 0",
        DISTRIBUTED,
    ),
    Defect(
        "share_across_replicas is ignored",
        "layers/_substitution/seed_stream.py",
        "replica = 0 if self.share_across_replicas else seeds.replica_id()",
        "replica = seeds.replica_id()",
        DISTRIBUTED,
    ),
    Defect(
        "the two directions of a Bidirectional draw alike",
        "layers/_substitution/seed_stream.py",
        "return [seeds.fold_in(s, self.stream, 0) for s in chosen] if self.stream else chosen",
        "return chosen",
        ("tests/layers/test_seed_stream.py", "tests/layers/test_weight_drop_lstm.py"),
    ),
    Defect(
        "training calls are not counted",
        "layers/_substitution/seed_stream.py",
        "counted = constant((0, 1), tf.int64)",
        "counted = constant((0, 0), tf.int64)",
        DRAWN,
    ),
    Defect(
        "a weight file does not hold the number of the call",
        "layers/_substitution/seed_stream.py",
        'store["state"] = np.asarray(self.state)',
        'store["state"] = np.asarray(self.state) * [1, 0]',
        KEPT,
    ),
    Defect(
        "a checkpoint does not hold the number of the call",
        "layers/_substitution/seed_stream.py",
        "_keras.variables.checkpoint(self, self.generator)",
        "pass",
        KEPT,
    ),
    Defect(
        "the seed of a weight depends on the names of the layers it is in",
        "layers/_substitution/substituted_call.py",
        "draws.seeds_from_state(state, [target.position for target, _ in targeted])",
        "draws.seeds_from_state(state, [sum(map(ord, target.path)) for target, _ in targeted])",
        conformance("draws", "whatever_was_built and (Dense or Sequential)"),
    ),
    Defect(
        "a schedule of the rate is one call ahead",
        "layers/_substitution/substituted_call.py",
        "parametrization.at(number)",
        "parametrization.at(number + 1)",
        ("tests/layers/test_weight_dropout.py", "tests/layers/test_parametrized.py"),
    ),
    # Layers
    Defect(
        "a tensor as training flag counts as True",
        "tfwd/training_flag.py",
        "return tf.cond(training, if_training, otherwise)",
        "return if_training()",
        ("tests/test_training_flag.py",),
    ),
    Defect(
        "biases are dropped too when no weights are named",
        "layers/_substitution/weight_selection.py",
        "len(variable.shape) >= 2",
        "len(variable.shape) >= 1",
        ("tests/layers/test_weight_selection.py",),
    ),
    Defect(
        "excluded weights are parametrized",
        "layers/_substitution/weight_patterns.py",
        "        remaining = [t for t in targets if t.position not in left_out]\n",
        "        remaining = targets\n",
        ("tests/layers/test_weight_selection.py",),
    ),
    Defect(
        "a wrapper's file forgets which weights are excluded",
        "layers/parametrized.py",
        '            "exclude": self.exclude,\n',
        "",
        ("tests/layers/test_weight_selection.py",),
    ),
    Defect(
        "a pattern that earlier ones shadow is accepted",
        "layers/_substitution/weight_patterns.py",
        "if all(t.position in taken for t in remaining):",
        "if False:",
        ("tests/layers/test_weight_selection.py",),
    ),
    Defect(
        "the table shows a schedule's value in the first call",
        "tfwd/parametrizations/weight_table.py",
        "parametrization.at(tf.constant(call, tf.int64))",
        "parametrization.at(tf.constant(0, tf.int64))",
        ("tests/test_weight_table.py",),
    ),
    Defect(
        "predict_samples draws other weights for each batch",
        "tfwd/monte_carlo/prediction.py",
        "                sampled.begin()\n",
        "",
        ("tests/monte_carlo/test_samples.py",),
    ),
    Defect(
        "training after predict_samples does not continue with the next draws",
        "tfwd/monte_carlo/model_function.py",
        "                state.assign(value)\n\n    def begin",
        "                pass\n\n    def begin",
        ("tests/monte_carlo/test_training_true.py",),
    ),
    Defect(
        "predict_samples runs other layers as in training",
        "layers/_substitution/weight_perturbation_mixin.py",
        "function, flag = _under(function, flag), True",
        "function, flag = _under(function, True), True",
        ("tests/conformance/test_samples.py",),
    ),
    Defect(
        "predict_samples normalizes with the statistics of the batch",
        "tfwd/monte_carlo/model_function.py",
        'given.arguments["training"] = False',
        "pass",
        ("tests/monte_carlo/test_training_true.py",),
    ),
    Defect(
        "predict_samples copies Mixout's references for good",
        "layers/_substitution/reference_weights.py",
        "            taken.assign(False)\n",
        "            pass\n",
        ("tests/monte_carlo/test_samples.py",),
    ),
    Defect(
        "Mixout does not notice that a model sets its weights",
        "layers/_substitution/reference_weights.py",
        "weight_setters.listen(variable, self)",
        "pass",
        ("tests/layers/test_mixout_new_weights.py",),
    ),
    Defect(
        "Mixout warns of weights that a callback of the same training sets",
        "layers/_substitution/weight_setters.py",
        'if name == "fit" and isinstance(one, keras.Model):',
        "if False:",
        ("tests/layers/test_mixout_new_weights.py",),
    ),
    Defect(
        "DropoutEmbedding drops entries and not rows",
        "layers/dropout_embedding.py",
        '{"embeddings": Dropout(rate, noise_shape=(None, 1))}, seed',
        '{"embeddings": Dropout(rate)}, seed',
        ("tests/layers/test_dropout_embedding.py",),
    ),
    Defect(
        "unwrap returns a copy, and not a layer on the same variables",
        "layers/parametrized.py",
        "return self.layer\n\n    def get_config",
        "return type(self.layer).from_config(self.layer.get_config())\n\n    def get_config",
        ("tests/test_unwrap.py",),
    ),
    Defect(
        "what a wrapped layer updates, such as statistics, is lost",
        "layers/_substitution/weight_perturbation_mixin.py",
        "stateless_call.assign(result.updates)",
        "pass",
        ("tests/layers/test_transparency.py", "-k", "statistics_of_the_batch"),
    ),
    # Recurrent loops
    Defect(
        "the forget gate of the fast LSTM has the gradient of another step",
        "tfwd/_recurrent/lstm.py",
        "time_loop.of_sigmoid(f, dc_t * before)",
        "time_loop.of_sigmoid(f, dc_t * c)",
        RECURRENCE,
    ),
    Defect(
        "the update gate of the fast GRU has the gradient of another step",
        "tfwd/_recurrent/gru.py",
        "dh * (before[t] - g)",
        "dh * (kept.outputs[t] - g)",
        RECURRENCE,
    ),
    Defect(
        "a masked step of the fast LSTM lets the gradient of its cell through its gates",
        "tfwd/_recurrent/lstm.py",
        "dc_t = tf.where(mask[t], dc_t, dc)",
        "pass",
        RECURRENCE,
    ),
    # Optimizers
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
        "a variable that stands in the list twice is decayed twice",
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
        "NonMonotonicASGD compares with an evaluation too many",
        "optimizers/non_monotonic_asgd.py",
        "float(recent[0])",
        "float(recent[min(1, len(recent) - 1)])",
        AVERAGE,
    ),
    Defect(
        "the average of NonMonotonicASGD leaves its last step out",
        "optimizers/non_monotonic_asgd.py",
        "share = tf.cast(1 / count, average.dtype)",
        "share = tf.cast(1 / (count + 1), average.dtype)",
        AVERAGE,
    ),
    # Moments of gradients
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
        "the two uses of one weight are squared apart",
        "tfwd/gradients/shared_weights.py",
        "squares = squares + product",
        "pass",
        (RULES, "-k", "tied_embedding or used_twice"),
    ),
    # The language model
    Defect(
        "the states that one window ends with are not those that the next begins with",
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
        "a worker does not learn that another one must stop",
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
        "two workers may have one number",
        "tfwd/runs/workers/rendezvous.py",
        "if number in self._present:",
        "if False:",
        ("tests/runs/test_rendezvous.py",),
    ),
    Defect(
        "a run that goes on begins with states that are zero",
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
    # Fine-tuning
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
    # Non-finite values
    Defect(
        "infinities of the two signs are taken for each other",
        "tfwd/finite.py",
        "_count(infinite & (tensor > 0)),",
        "_count(infinite & (tensor < 0)),",
        ("tests/test_finite.py",),
    ),
    Defect(
        "what is not finite reaches the weights",
        "tfwd/_graph/tentative_assignments.py",
        "gated = tf.where(good, new, before)",
        "gated = new",
        (*FINITE, "tests/optimizers/test_apply_if_finite.py"),
    ),
    Defect(
        "what a function that was traced before assigns stays",
        "tfwd/_graph/tentative_assignments.py",
        "return _keras.patched([*methods, before_calls(_announce)])",
        "return _keras.patched(methods)",
        ("tests/callbacks/test_finite_check_inner_functions.py", "-k", "whose"),
    ),
    Defect(
        "what a custom constraint writes is not checked",
        "tfwd/numerics/checked_step/checked_step.py",
        "careful = self._exact or not safe or _has_own_constraint(self.model)",
        "careful = self._exact or not safe",
        ("tests/numerics/test_report_advice_in_fit.py", "-k", "constraint"),
    ),
    Defect(
        "what was assigned before the decision stays",
        "tfwd/numerics/checked_step/checked_step.py",
        "assign_all(zip(trace.variables, before, strict=True))",
        "pass",
        (*FINITE, "-k", "before_the_step or without_the_batch"),
    ),
    Defect(
        "a negative learning rate is taken",
        "tfwd/numerics/checked_step/replica_step.py",
        "tf.math.is_finite(rate) & (rate >= 0)",
        "tf.math.is_finite(rate)",
        ("tests/numerics/test_causes_in_data_and_weights.py", "-k", "rate"),
    ),
    Defect(
        "going back to an epoch leaves the optimizer's variables",
        "tfwd/numerics/checked_step/tracked_variables.py",
        "    found += [v for optimizer in optimizers for v in "
        "_keras_training.optimizer_state(optimizer)]\n    plain = "
        "[_keras.variables.tf_variable(v) for v in [*found, *variables_in(model, *optimizers)]]\n",
        "    plain = [_keras.variables.tf_variable(v) for v in found]\n",
        ("tests/callbacks/test_finite_check_restore.py", "-k", "goes_back"),
    ),
    Defect(
        "what operations write into weights is not looked at",
        "tfwd/numerics/checked_step/replica_step.py",
        "if self._step.dry or self._past_methods:  # operations",
        "if self._step.dry:  # nothing",
        ("tests/callbacks/test_finite_check_actions.py", "-k", "operation_writes"),
    ),
    Defect(
        "steps between two checks are made by another function than Keras's",
        "tfwd/callbacks/finite_check.py",
        "if steps == 1 and not self._is_due():  # Keras's own step, at its own cost",
        "if False:",
        ("tests/callbacks/test_finite_check_cost.py",),
    ),
    Defect(
        "a loss of several outputs is not attributed",
        "tfwd/numerics/diagnosis.py",
        "    if not several:",
        "    if True:",
        ("tests/numerics/test_report_advice_in_fit.py", "-k", "output"),
    ),
    Defect(
        "a layer that draws is run again by tf.recompute_grad",
        "layers/_substitution/caller_detection.py",
        "if frame.f_code in _recomputing:",
        "if False:",
        ("tests/layers/test_recomputed_calls.py",),
    ),
    Defect(
        "training calls with a rate of 0 are not counted",
        "layers/_substitution/weight_perturbation_mixin.py",
        "if not targeted and flag is not False:",
        "if False:",
        ("tests/layers/test_rate_of_zero.py",),
    ),
    Defect(
        "what goes into a relu is not looked at",
        "tfwd/numerics/step_watch.py",
        'NAN_HIDING_ACTIVATIONS = ("relu", "relu6", "leaky_relu")',
        "NAN_HIDING_ACTIVATIONS = ()",
        (*FINITE, "-k", "onednn or relu"),
    ),
    Defect(
        "the first replica is reported, whichever it was",
        "tfwd/numerics/diagnosis.py",
        "number = firsts.index(min(firsts))",
        "number = 0",
        (*FINITE, "-k", "replicas"),
    ),
    Defect(
        "bad steps in a row are counted over good ones",
        "tfwd/callbacks/finite_check.py",
        "        self._policy.good_step()\n        self.scaled_down",
        "        self.scaled_down",
        (*FINITE, "-k", "skip or row"),
    ),
    Defect(
        "probes look in each step",
        "tfwd/numerics/probes.py",
        "due = (clock - 1) % self.every_n_steps == 0",
        "due = (clock - 1) % 1 == 0",
        ("tests/numerics/test_probes.py", "-k", "every"),
    ),
    Defect(
        "the gradient of zeros is no gradient",
        "tfwd/numerics/unused_weights.py",
        "tf.convert_to_tensor(gradient) != 0",
        "tf.convert_to_tensor(gradient) == 0",
        ("tests/numerics/test_unused_weights.py",),
    ),
    Defect(
        "a blow-up is lost where steps are put together",
        "tfwd/numerics/magnitude_plot.py",
        "one[label] = max(value, one.get(label, 0.0))",
        "one[label] = value",
        ("tests/callbacks/test_finite_check_log.py",),
    ),
    Defect(
        "a window that is left out has drawn",
        "tfwd/runs/training/step.py",
        "draws, strict=True):\n                variable.assign(value)",
        "draws, strict=True):\n                pass",
        ("tests/lm/test_training_step.py", "-k", "left_out", "-m", ""),
    ),
    Defect(
        "a run goes back to weights that it does not have",
        "tfwd/numerics/bad_step_policy.py",
        "assign_all(self._values or ())",
        "pass",
        ("tests/lm/test_divergence.py", "-k", "going_back", "-m", ""),
    ),
    Defect(
        "the activation of a recurrent layer is set, which is its cell's",
        "tfwd/numerics/step_watch.py",
        'getattr(vars(layer).get("activation"), "__name__", "")',
        'getattr(getattr(layer, "activation", None), "__name__", "")',
        ("tests/numerics/test_causes_in_rows.py", "-k", "with_a_relu"),
    ),
    Defect(
        "the loss of a training step of one's own is not looked at",
        "tfwd/numerics/step_watch.py",
        'self.check("loss", name, loss)',
        "pass",
        ("tests/numerics/test_causes_in_rows.py", "-k", "own_step"),
    ),
    Defect(
        "only the first of several losses is checked",
        "tfwd/numerics/step_watch.py",
        "for name, loss in scalars:",
        "for name, loss in scalars[:1]:",
        ("tests/numerics/test_probes_of_losses.py",),
    ),
    Defect(
        "an epoch whose steps are all left out has a loss of 0",
        "tfwd/callbacks/finite_check.py",
        "if bad < steps or not bad:",
        "if bad <= steps or not bad:",
        ("tests/callbacks/test_finite_check_actions.py", "-k", "all_left_out"),
    ),
    Defect(
        "a checked softmax loses its logits",
        "tfwd/_graph/loss_logits.py",
        "setattr(result, _ATTRIBUTE, identity(logits) if for_logits else logits)",
        "pass",
        ("tests/callbacks/test_finite_check_softmax_losses.py",),
    ),
    Defect(
        "the update of a float16 weight is made before it is checked",
        "tfwd/numerics/checked_step/checked_step.py",
        "all(map(_is_safe, leaves)) and not _has_half(self.model)",
        "all(map(_is_safe, leaves))",
        ("tests/callbacks/test_finite_check_float16_weights.py",),
    ),
    Defect(
        "a restore goes back to the weights that another callback has exchanged",
        "tfwd/callbacks/finite_check.py",
        "self._snapshot.end_epoch()",
        "self._snapshot.end_epoch() or self._snapshot.begin_step()",
        ("tests/callbacks/test_finite_check_restore.py", "-k", "averaged"),
    ),
    Defect(
        "a restore raises a learning rate that another callback has lowered",
        "tfwd/numerics/epoch_snapshot.py",
        "lower = min(stored, rate) * self._policy.factor",
        "lower = stored * factor",
        ("tests/callbacks/test_finite_check_restore.py", "-k", "another_callback"),
    ),
    Defect(
        "a gradient is said to come from all layers that take any call of a shared layer",
        "tfwd/numerics/step_watch.py",
        'source = self._followers_of((name, call)) if kind == "gradient" else ()',
        "source = tuple(x for c in range(9) for x in self._followers_of((name, c)))",
        ("tests/numerics/test_gradient_sources.py",),
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
    # Pretrained layers
    Defect(
        "which of ALBERT's layers share their weights is computed in whole numbers",
        "layers/transformer/transformer_stack.py",
        "self.layers[int(i / (self.num_layers / len(self.layers)))]",
        "self.layers[i * len(self.layers) // self.num_layers]",
        (BY_HAND, "-k", "share_their_weights or unequal_sizes"),
    ),
    Defect(
        "an additive mask is taken as a boolean one",
        "layers/transformer/input_checks.py",
        "return self._require_each(zeros | ones, mask, message, ones)",
        "return tf.cast(mask, tf.bool)",
        ("tests/layers/transformer/test_input_checks.py",),
    ),
    Defect(
        "attention's mask is not part of its product",
        "layers/transformer/masked_attention_scores.py",
        "ones = tf.ones_like(queries[..., :1])",
        "ones = tf.zeros_like(queries[..., :1])",
        ("tests/layers/transformer/test_masked_attention_scores.py",),
    ),
    Defect(
        "a rate that is NaN under XLA drops everything",
        "tfwd/_random/masks_and_normals.py",
        "return tf.where(tf.math.is_nan(keep), float(LEVELS), keep * LEVELS)",
        "return keep * LEVELS",
        ("tests/test_masks_and_normals.py", "-k", "rate_that_is_nan"),
    ),
    Defect(
        "token ids that are not whole are cut",
        "layers/transformer/input_checks.py",
        "ids = self._require_each(tf.equal(tf.round(ids), ids), ids, message, ids)",
        "ids = self._require_each(tf.equal(ids, ids), ids, message, ids)",
        ("tests/layers/transformer/test_input_checks.py",),
    ),
    Defect(
        "the outputs of an EinsumDense have the order of its kernel",
        "tfwd/pretrained/flatten_order/einsum_axes.py",
        "return [axis for axis in self.output if axis in self.kernel]",
        "return [axis for axis in self.kernel if axis in self.output]",
        ("tests/pretrained/test_layouts.py", "-k", "many_axes"),
    ),
    Defect(
        "an EinsumDense flattens an image in the order of Keras",
        "tfwd/pretrained/flatten_order/einsum_axes.py",
        'call.recorder.record_axis(call.layer, "inputs", merged)',
        'call.recorder.record_axis(call.layer, "inputs", None)',
        ("tests/pretrained/test_einsum_of_images.py",),
    ),
    Defect(
        "a normalization of channels keeps the order of an image",
        "tfwd/pretrained/flatten_order/normalizations.py",
        "    if isinstance(layer, groups.LAST_AXES_LAYERS):",
        "    if False:",
        ("tests/pretrained/test_normalized_channels.py",),
    ),
    Defect(
        "a layer inside a custom layer may take a flattened image unseen",
        "tfwd/pretrained/flatten_order/layer_rules.py",
        'call.recorder.record_unseen("inputs", shape, inside, takes)',
        "pass",
        ("tests/pretrained/test_hidden_flatten.py",),
    ),
    Defect(
        "a sum of an image and a sequence has no order",
        "tfwd/pretrained/flatten_order/merges.py",
        "        layout = layout.join(other.layout, reason)",
        "        pass",
        ("tests/pretrained/test_orders_that_nothing_proves.py", "-k", "sum"),
    ),
    Defect(
        "a layer that is called twice has the order of its last call",
        "tfwd/pretrained/flatten_order/layer_orders.py",
        "            order = _SEVERAL",
        "            pass",
        ("tests/pretrained/test_orders_that_nothing_proves.py", "-k", "twice"),
    ),
    Defect(
        "a subclassed model may flatten with a function unseen",
        "tfwd/pretrained/flatten_order/unseen_layers.py",
        "if size not in known | last_image:",
        "if False:",
        ("tests/pretrained/test_orders_that_nothing_proves.py", "-k", "subclassed"),
    ),
    Defect(
        "outputs that are joined before they become an image keep their order",
        "tfwd/pretrained/flatten_order/layer_orders.py",
        "is_changed = any([each.mark_sources(known) for each in made])",
        "is_changed = False",
        ("tests/pretrained/test_orders_that_nothing_proves.py",),
    ),
    Defect(
        "parts of an image merge in the order of Keras",
        "tfwd/pretrained/flatten_order/made_axes.py",
        "if are_two and not any(map(known.of, self._all_wholes())):",
        "if self._has_parts_only():",
        ("tests/pretrained/test_axes_through_models.py",),
    ),
    Defect(
        "the config beside the weights is not read",
        "tfwd/pretrained/published_layers.py",
        "config, error = workers.json_from_chief(lambda: _config_at(path))",
        "config, error = None, None",
        ("tests/layers/transformer/test_config_of_weights.py",),
    ),
    Defect(
        "the gates of PyTorch's GRU stay in their order",
        "tfwd/pretrained/torch_layouts.py",
        "_GRU_GATES = (1, 0, 2)",
        "_GRU_GATES = (0, 1, 2)",
        ("tests/pretrained/test_layouts.py", "-k", "recurrent"),
    ),
    Defect(
        "a leaky ReLU has the slope of Keras's",
        "layers/transformer/activations.py",
        "alpha=0.01",
        "alpha=0.2",
        (BY_HAND, "-k", "activations"),
    ),
    Defect(
        "an argument that no shape tells is not compared with the config",
        "layers/transformer/formats/published_configs.py",
        "            if not same:\n",
        "            if False:\n",
        (BY_HAND, "-k", "shape"),
    ),
    Defect(
        "frozen parts of a layer are set free in a file",
        "layers/transformer/composite_layer.py",
        "                inside[path].trainable = flag",
        "                pass",
        ("tests/layers/transformer/test_export_and_replicas.py", "-k", "frozen or flags"),
    ),
    Defect(
        "a functional model waits for layers that are not in its graph",
        "tfwd/_keras3/layer_building.py",
        "        for inner in _called_layers(layer)",
        "        for inner in sublayers(layer)",
        ("tests/in_place/test_copies.py",),
    ),
    Defect(
        "a layer inside a parametrized wrapper draws again in each trace",
        LINK,
        "        return {one: one.begin(one.target, training) for one in dict.fromkeys(owners)}",
        "        return {}",
        ("tests/in_place/test_several_parametrizations.py",),
    ),
    Defect(
        "parametrizations in place act in the order of the layers",
        "tfwd/parametrizations/chain.py",
        "        ordered += pairs if is_wrapper else sorted(pairs, key=lambda pair: pair[0] or 0)",
        "        ordered += pairs",
        ("tests/in_place/test_several_parametrizations.py", "-k", "order_of_the_calls"),
    ),
    Defect(
        "a layer that reads a weight of a layer inside it loses a parametrization",
        INSTALLATION,
        "            for other, larger in links_that_share(link):",
        "            for other, larger in ():",
        ("tests/in_place/test_several_parametrizations.py", "-k", "order_of_the_calls"),
    ),
    Defect(
        "a report blames an input that the layer does not read",
        "tfwd/numerics/causes/evidence.py",
        'first.direction != "forward" or name in first.origins',
        "True",
        ("tests/numerics/test_causes_by_input.py", "-k", "not_read and eager"),
    ),
    Defect(
        "a layer that reads the shape of an input is said to read its numbers",
        "tfwd/_graph/tensor_origins.py",
        "if kind in _READ_SHAPES:",
        "if False:",
        ("tests/test_tensor_origins.py",),
    ),
    Defect(
        "a report on a loss names labels of rows whose loss is finite",
        "tfwd/numerics/causes/losses.py",
        "rows = bad if bad.any() else np.ones(len(values), bool)",
        "rows = np.ones(len(values), bool)",
        ("tests/numerics/test_causes_in_losses.py", "-k", "finite_in_other_rows"),
    ),
    Defect(
        "an interrupted FiniteCheck removes the next one",
        "tfwd/callbacks/finite_check.py",
        "        self._end_interrupted_checks()\n",
        "",
        ("tests/callbacks/test_finite_check_several_fits.py", "-k", "another_check"),
    ),
    # Loading on several workers
    Defect(
        "workers are not told of another worker's failure",
        LOCKSTEP,
        "        if error is None or isinstance(error, Exception):",
        "        if error is None:",
        SHARED,
    ),
    Defect(
        "workers do not get the end of a long message",
        LOCKSTEP,
        "        for start in range(0, len(content), CHUNK):",
        "        for start in range(0, len(content) - CHUNK, CHUNK):",
        SHARED,
    ),
    Defect(
        "workers with other plans load their weights",
        "tfwd/pretrained/loading_plan.py",
        "            if here != there:",
        "            if here[:1] != there[:1]:",
        SHARED,
    ),
    Defect(
        "each of several workers draws the parts that a file lacks",
        "layers/transformer/formats/published_layer.py",
        "                if not workers.is_alone:",
        "                if workers is None:",
        SHARED,
    ),
    Defect(
        "each of several workers reads the config of a model",
        "layers/transformer/formats/published_configs.py",
        "            name, values = workers.json_from_chief(lambda: _read(path))",
        "            name, values = _read(path)",
        SHARED,
    ),
    # Loading pretrained weights
    Defect(
        "a bias has PyTorch's order beside any kernel",
        "tfwd/pretrained/key_styles.py",
        'return None if _ending(name) == "bias" else self.of(target)[name]',
        "return self.of(target)[name]",
        ("tests/pretrained/test_key_styles.py",),
    ),
    Defect(
        "a file of safetensors always has PyTorch's order",
        "tfwd/pretrained/key_styles.py",
        "self._default = source.transposed and not is_of_keras",
        "self._default = source.transposed",
        ("tests/pretrained/test_key_styles.py",),
    ),
    Defect(
        "a tensor in Keras's order says that PyTorch has the same order",
        "tfwd/pretrained/file_layouts.py",
        "shape or of_other.transposed is not False or self._is_in_keras_order(target)",
        "True",
        ("tests/pretrained/test_key_styles.py",),
    ),
    Defect(
        "no order is asked for beside transposed=False, if nothing proves PyTorch's order",
        "tfwd/pretrained/unknown_orders.py",
        "        if isinstance(shown, UnknownFeatureOrder):\n            advice",
        "        if False:\n            advice",
        ("tests/pretrained/test_key_styles.py",),
    ),
    Defect(
        "features of a tensor in Keras's order are not compared with other weights",
        "tfwd/pretrained/file_layouts.py",
        "        inputs_first = not self._styles.is_transposed(target, key, step.key)\n",
        "        inputs_first = not self._styles.is_transposed(target, key, step.key)\n"
        "        if inputs_first:\n            return\n",
        ("tests/pretrained/test_key_styles.py",),
    ),
    Defect(
        "the axis of a gain in the file does not count",
        "tfwd/pretrained/gains.py",
        "len(in_file) == rank and in_file[axis] == size",
        "len(in_file) == rank",
        ("tests/pretrained/test_gains.py",),
    ),
    Defect(
        "half of a weight normalization is loaded as the weight",
        "tfwd/pretrained/computed_weights.py",
        '(other == "u" or beside_it not in loaded)',
        'other == "u"',
        ("tests/pretrained/test_computed_weights.py",),
    ),
    Defect(
        "the original of a spectral normalization is loaded beside its vectors",
        "tfwd/pretrained/computed_weights.py",
        "if not (spectral or left_out)",
        "if not left_out",
        ("tests/pretrained/test_computed_weights.py",),
    ),
    Defect(
        "kernels that are not loaded show no order of axes",
        "tfwd/pretrained/square_kernels.py",
        "told[is_torch].setdefault(value, key)",
        "pass",
        ("tests/pretrained/test_square_kernels.py",),
    ),
    Defect(
        "a name of Keras shows the order of a cube in a file of PyTorch",
        "tfwd/pretrained/key_styles.py",
        "return len(axes) > 1 and",
        "return False and",
        ("tests/pretrained/test_key_styles.py",),
    ),
    Defect(
        "the gates of a user's LSTM have PyTorch's order",
        "tfwd/pretrained/known_weights.py",
        "WITH_GATES = (keras.layers.LSTMCell, keras.layers.GRUCell)",
        "WITH_GATES = (keras.layers.GRUCell,)",
        ("tests/pretrained/test_users_classes.py",),
    ),
    Defect(
        "a layer on the channels of an input image shows PyTorch's order",
        "tfwd/pretrained/flatten_order/tensor_axes.py",
        "return is_input and len(self.axes) > 3",
        "return is_input and len(self.axes) > 9",
        ("tests/pretrained/test_images_of_the_caller.py",),
    ),
    Defect(
        "a pixel shuffle that a model writes is not seen",
        "tfwd/pretrained/flatten_order/pixel_shuffles.py",
        "if not pixels.issuperset(parts[parts.index(pixel) + 1 :]):",
        "if False:",
        ("tests/pretrained/test_divided_channels.py",),
    ),
    Defect(
        "a flattened image has its rows and columns exchanged",
        "tfwd/pretrained/torch_layouts.py",
        "    first = _split_axis(inputs, shape[0])\n    if len(shape) == 1:",
        "    first = _split_axis(inputs, shape[0])\n"
        "    if isinstance(inputs, FlattenedAxes) and len(inputs.shape) == 3:\n"
        "        rows, columns, channels = inputs.positions\n"
        "        first = FlattenedAxes(inputs.shape, (columns, rows, channels))\n"
        "    if len(shape) == 1:",
        ("tests/pretrained/test_random_models.py",),
    ),
    Defect(
        "every rule is tried for every variable",
        "tfwd/path_patterns.py",
        "    if not isinstance(pattern, str) or expression.flags & _CHANGES:",
        "    if True:",
        ("tests/pretrained/test_loading_cost_and_values.py",),
    ),
    Defect(
        "flags of an expression are overlooked where it is looked up",
        "tfwd/path_patterns.py",
        "_CHANGES = re.IGNORECASE | re.VERBOSE",
        "_CHANGES = re.VERBOSE",
        ("tests/pretrained/test_loading_cost_and_values.py",),
    ),
    Defect(
        "the last rows of a transposed kernel stay zero",
        "tfwd/pretrained/tiled_transpose.py",
        "        for i in range(0, rows, TILE):",
        "        for i in range(0, max(rows - rows % TILE, 1), TILE):",
        ("tests/pretrained/test_loading_cost_and_values.py",),
    ),
    Defect(
        "each block of a table is read into its beginning",
        "tfwd/pretrained/sources/safetensors_files.py",
        "begin = 0 if into is None else start * row",
        "begin = 0",
        ("tests/pretrained/test_loading_cost_and_values.py",),
    ),
    # Parametrizations in place
    Defect(
        "a weight that an outer layer has computed is computed again inside",
        LINK,
        "        if self.substituted <= present.covered:\n",
        "        if False:\n",
        (LAYER_KINDS, "-k", "cells"),
    ),
    Defect(
        "reads before the call of a layer get effective weights",
        LINK,
        "now._replace(covered=now.covered | own)",
        "now",
        ("tests/in_place/test_several_parametrizations.py", "-k", "a_model_inside_a_model"),
    ),
    Defect(
        "each layer takes its own number, not the outermost one",
        LINK,
        "        if present is not None:\n            return self._run(",
        "        if False:\n            return self._run(",
        (ANNOUNCED, "-k", "uses_the_announced"),
    ),
    Defect(
        "a container reads the raw value of a tied weight",
        PARAMETRIZATION,
        "        if not chains or chains[0][0] is not self:\n",
        "        if True:\n",
        (ANNOUNCED, "-k", "uses_the_announced and tied"),
    ),
    Defect(
        "backward calls a layer without the present calls",
        LINK,
        "            with running_calls.using_calls({**inner, self.in_place: now}):\n",
        "            if True:\n",
        (LAYER_KINDS, "-k", "large_weights and (bidirectional or cells)"),
    ),
    Defect(
        "unwrap leaves the hooks",
        "layers/_substitution/method_hooks.py",
        "    hook.links.remove(link)\n",
        "    pass\n",
        (ANNOUNCED, "-k", "uses_the_announced"),
    ),
    Defect(
        "a layer's own attribute `call` is lost",
        "layers/_substitution/method_hooks.py",
        "hook.replaced[name] = vars(layer).get(name)",
        "hook.replaced[name] = None",
        (LAYER_KINDS, "-k", "replaced"),
    ),
    Defect(
        "checkpoints do not track the seeds",
        INSTALLATION,
        "        self.draws = [one.draws for one in held.all]\n",
        "        self.draws = []\n",
        ("tests/in_place/test_saved_state.py",),
    ),
    Defect(
        "functions of models around the target are not forgotten",
        "tfwd/in_place.py",
        "        if any(id(layer) in inside for layer in _keras.layers.all_layers(found)):\n",
        "        if found is target:\n",
        ("tests/in_place/test_traced_functions.py", "-k", "before_and_after or around_the_target"),
    ),
    Defect(
        "a seed depends on the number of weights before it in the parametrization",
        LINK,
        "        return self.targeted_here\n",
        "        here = enumerate(self.targeted_here)\n"
        "        return [(t._replace(position=i), p) for i, (t, p) in here]\n",
        (ANNOUNCED, "-k", "uses_the_announced"),
    ),
    Defect(
        "an interrupted parametrize leaves hooks",
        INSTALLATION,
        "    except BaseException:  # such as Ctrl-C\n",
        "    except OSError:\n",
        ("tests/in_place/test_errors.py", "-k", "interruption"),
    ),
    Defect(
        "equal layers share an analysis although one has a further parametrization",
        "layers/_substitution/keras_own_layers.py",
        "    if len(added) > 1 or not is_keras_own(owner):\n",
        "    if not is_keras_own(owner):\n",
        ("tests/in_place/test_several_parametrizations.py", "-k", "equal_layers"),
    ),
    Defect(
        "a state that is infinite before a step condemns the step",
        "tfwd/callbacks/finite_check.py",
        "if first is not None and not is_state(self.model, first.frame):",
        "if first is not None:",
        ("tests/callbacks/test_finite_check_infinite_states.py",),
    ),
    Defect(
        "an optimizer's state that is infinite before a step condemns the step",
        "tfwd/numerics/checked_step/replica_step.py",
        "value = tf.where(tf.math.is_finite(before), value, tf.zeros_like(value))",
        "pass",
        ("tests/callbacks/test_finite_check_optimizer_slots.py",),
    ),
    Defect(
        "a custom layer is said to divide 0 by 0",
        "tfwd/numerics/causes/division.py",
        'if first.kind != "input" and first.layer in DIVIDING and _keras.is_of_keras(type(layer)):',
        'if first.kind != "input":',
        ("tests/numerics/test_causes_by_function.py",),
    ),
    Defect(
        "the input of another call of a shared layer is quoted",
        "tfwd/numerics/causes/evidence.py",
        "if self.calls == 1:",
        "if True:",
        ("tests/numerics/test_causes_by_input.py",),
    ),
]
