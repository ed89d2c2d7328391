"""Monte Carlo predictions: each sample is the plain layer on the weights of one training call."""

import numpy as np
import tensorflow as tf
from stack_marks import quick_rows

import tfwd
from conformance import harness
from conformance.table import CASES, Case


@quick_rows(
    "LSTM, dropout",
    "Dense, dropout",
    "Dense, patterns",
    "user's layer, dropout",
    "Embedding, noise",
)
@harness.each_or_half(CASES)
def test_a_sample_is_the_plain_layer_on_effective_weights(case: Case) -> None:
    wrapped, plain = harness.built(case), harness.plain(case)
    model, inputs = harness.model_of(wrapped, case), harness.feed(case)
    found = tfwd.predict_samples(model, inputs, 2, return_samples=True, verbose=0).samples
    for sample in range(2):
        plain.set_weights([np.asarray(w) for w in harness.all_effective(wrapped, sample)])
        harness.reset(plain)
        expected = harness.run(plain, case)
        harness.assert_close([y[sample] for y in tf.nest.flatten(found)], expected)
    assert harness.differ(*zip(*([y[0], y[1]] for y in tf.nest.flatten(found)), strict=True))
    assert all(layer.calls == 0 for layer in harness.perturbing(wrapped))
