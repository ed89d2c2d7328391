"""Published configs of all kinds against BERT and ALBERT in NumPy (`tests/encoders_by_hand.py`)."""

import encoders_by_hand as by_hand
import numpy as np
import pytest

from tfwd.layers import transformer as T
from tfwd.pretrained import PlanError

IDS = np.array([[5, 6, 7, 8, 9], [3, 4, 5, 6, 7]])


def agrees(folder, config, tensors, **options):
    """The layer that is loaded computes what NumPy does."""
    bert = T.Bert.from_pretrained(folder, add_pooler=True)
    found = bert(IDS)
    last, pooled = by_hand.encode(config, tensors, IDS, **options)
    np.testing.assert_allclose(found["last_hidden_state"], last, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["pooler_output"], pooled, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("embedding_size", [12, 4])
def test_albert_has_a_projection_at_equal_widths_too(embedding_size, tmp_path):
    sizes = {"model_type": "albert", "embedding_size": embedding_size, "num_hidden_groups": 1}
    agrees(tmp_path, *by_hand.publish(tmp_path, **sizes))


def test_a_part_of_the_family_that_the_layer_lacks_is_an_error(tmp_path):
    """Only the pooler and the named heads may be left out."""
    sizes = {"model_type": "albert", "embedding_size": 12, "num_hidden_groups": 1}
    by_hand.publish(tmp_path, **sizes)
    T.Bert.from_pretrained(tmp_path)
    with pytest.raises(PlanError, match=r"embedding_hidden_mapping_in.weight' is for a part of"):
        T.Bert.from_pretrained(tmp_path, project=False)
    by_hand.publish(tmp_path)
    with pytest.raises(PlanError, match=r"'embeddings.token_type_embeddings.weight' is for a part"):
        T.Bert.from_pretrained(tmp_path, type_vocabulary_size=0)


@pytest.mark.parametrize(
    ("layers", "groups"), [(18, 14), (27, 21), (36, 14), (45, 35), (46, 30), (6, 3), (7, 3)]
)
def test_which_layers_share_their_weights(layers, groups):
    """The group of layer i is `int(i / (layers / groups))`, in floating point."""
    sizes = {"num_heads": 1, "hidden_size": 2, "intermediate_size": 1}
    stack = T.TransformerStack(layers, num_shared=groups, **sizes)
    called = []
    for number, layer in enumerate(stack.layers):
        layer.call = lambda x, mask=None, training=None, number=number: called.append(number) or x
    stack(np.ones((1, 1, 2), "float32"))
    assert called == [int(i / (layers / groups)) for i in range(layers)]


def test_albert_in_groups_of_unequal_sizes(tmp_path):
    sizes = {"model_type": "albert", "embedding_size": 4, "hidden_size": 6}
    sizes |= {"num_hidden_layers": 18, "num_hidden_groups": 14}
    agrees(tmp_path, *by_hand.publish(tmp_path, **sizes))
