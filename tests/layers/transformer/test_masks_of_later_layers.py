"""Masks that a BERT passes to later layers. NumPy computes the expected means over the tokens."""

import keras
import numpy as np
import pytest

from tfwd.layers import transformer as T

# RoBERTa uses the id 0 for the token <s>, and the id 1 for padding.
IDS = np.array([[5, 6, 0, 8], [0, 8, 1, 1]])


def bert(padding_id, **further):
    sizes = {"hidden_size": 12, "num_layers": 2, "num_heads": 3, "intermediate_size": 16}
    return T.Bert(20, max_length=8, padding_id=padding_id, **sizes, **further)


def pooled(kind, layer, ids):
    """Returns the mean of the positions that Keras's mask does not leave out."""
    pooling = keras.layers.GlobalAveragePooling1D()
    if kind == "eager":
        return pooling(layer(ids))
    inputs = keras.Input((None,), dtype="int32")
    if kind == "sequential":
        return keras.Sequential([inputs, layer, pooling])(ids)
    if kind == "dict":
        outputs = layer({"input_ids": inputs})
    else:
        outputs = layer(inputs)
    if kind == "all states":
        outputs = outputs["hidden_states"][-1]
    return keras.Model(inputs, pooling(outputs))(ids)


@pytest.mark.parametrize("kind", ["eager", "functional", "sequential", "dict", "all states"])
@pytest.mark.parametrize("padding_id", [0, 1, None])
def test_the_mask_follows_the_padding_id(padding_id, kind):
    layer = bert(padding_id, add_pooler=kind == "all states", return_all=kind == "all states")
    hidden = layer(IDS)
    hidden = np.asarray(hidden["last_hidden_state"] if kind == "all states" else hidden)
    shown = np.ones(IDS.shape, bool) if padding_id is None else np.not_equal(IDS, padding_id)
    expected = (hidden * shown[..., None]).sum(1) / shown.sum(1)[:, None]
    found = pooled(kind, layer, IDS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_mask_in_a_dict_comes_before_the_padding_id():
    layer, mask = bert(1), np.array([[1, 1, 1, 0], [1, 0, 1, 1]])
    names = ("input_ids", "attention_mask")
    inputs = {name: keras.Input((4,), dtype="int32", name=name) for name in names}
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(layer(inputs)))
    given = {"input_ids": IDS, "attention_mask": mask}
    hidden = np.asarray(layer(given))
    expected = (hidden * mask[..., None]).sum(1) / mask.sum(1)[:, None]
    np.testing.assert_allclose(model(given), expected, rtol=1e-4, atol=1e-5)
