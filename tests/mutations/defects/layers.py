"""Defects of wrapped layers and recurrent loops."""

from __future__ import annotations

from mutations.defects.defect import Defect

RECURRENCE = ("tests/test_recurrence.py",)

DEFECTS = [
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
        "the statistics that a wrapped layer updates are lost",
        "layers/_substitution/weight_perturbation_mixin.py",
        "stateless_call.assign(result.updates)",
        "pass",
        ("tests/layers/test_transparency.py", "-k", "statistics_of_the_batch"),
    ),
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
    Defect(
        "a layer that draws is run again by tf.recompute_grad",
        "layers/_substitution/caller_detection.py",
        "if frame.f_code in _recomputing:",
        "if False:",
        ("tests/layers/test_recomputed_calls.py",),
    ),
    Defect(
        "a functional model waits for layers that are not in its graph",
        "tfwd/_keras3/layer_building.py",
        "        for inner in _called_layers(layer)",
        "        for inner in sublayers(layer)",
        ("tests/in_place/test_copies.py",),
    ),
]
