"""Defects of the transformer layers."""

from __future__ import annotations

from mutations.defects.defect import Defect

BY_HAND = "tests/layers/transformer/test_numpy_encoders.py"

DEFECTS = [
    Defect(
        "the groups of ALBERT's layers are computed in whole numbers",
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
        "token ids that are no integers are truncated",
        "layers/transformer/input_checks.py",
        "ids = self._require_each(tf.equal(tf.round(ids), ids), ids, message, ids)",
        "ids = self._require_each(tf.equal(ids, ids), ids, message, ids)",
        ("tests/layers/transformer/test_input_checks.py",),
    ),
    Defect(
        "a leaky ReLU has the slope of Keras's",
        "layers/transformer/activations.py",
        "alpha=0.01",
        "alpha=0.2",
        (BY_HAND, "-k", "activations"),
    ),
    Defect(
        "an argument that no shape shows is not compared with the config",
        "layers/transformer/formats/published_configs.py",
        "            if not same:\n",
        "            if False:\n",
        (BY_HAND, "-k", "shape"),
    ),
    Defect(
        "ids that are no dict are their own mask",
        "layers/transformer/token_id_inputs.py",
        "return None if name else inputs",
        "return inputs",
        ("tests/layers/transformer/test_masks_of_later_layers.py",),
    ),
    Defect(
        "a file forgets which parts of a layer are frozen",
        "layers/transformer/composite_layer.py",
        "                inside[path].trainable = flag",
        "                pass",
        ("tests/layers/transformer/test_export_and_replicas.py", "-k", "frozen or flags"),
    ),
]
