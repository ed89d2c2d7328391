"""`FiniteCheck` on ragged and sparse data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError


class Weighted(keras.Model):
    """Model `x @ w` for each kind of `x`. A ragged row is filled with zeros."""

    def __init__(self):
        super().__init__()
        self.w = self.add_weight(shape=(5, 1), name="w", initializer="ones")

    def call(self, x):
        w = tf.convert_to_tensor(self.w)
        if isinstance(x, tf.SparseTensor):
            return tf.sparse.sparse_dense_matmul(x, w)
        return tf.matmul(x.to_tensor(shape=(None, 5)), w)


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
@pytest.mark.parametrize("value", [1.0, np.nan, np.inf])
def test_where_the_data_are_not_finite(kind, value):
    dense = np.zeros((8, 5), "float32")
    dense[0, 1], dense[5, 3], dense[6, 0] = 2.0, value, 1.0
    if kind == "sparse":
        x = tf.sparse.from_dense(dense)
    else:
        x = tf.RaggedTensor.from_tensor(dense, lengths=[2, 1, 0, 5, 0, 4, 1, 3])
    model = Weighted()
    model.compile("sgd", "mse", jit_compile=False)
    dataset = tf.data.Dataset.from_tensor_slices((x, np.ones((8, 1), "float32"))).batch(4)
    options = {"verbose": 0, "shuffle": False}
    if value == 1.0:
        model.fit(dataset, **options, callbacks=[FiniteCheck()])
        return
    with pytest.raises(NonFiniteError) as caught:
        model.fit(dataset, **options, callbacks=[FiniteCheck()])
    report = caught.value.report
    assert report.sentence.startswith("data 'x': ")
    assert report.first.detail.summary.non_finite == 1
    assert report.place == "epoch 1, batch 2"
    assert report.causes[0].name == "NaN or infinity in the input"
    assert "in row 1 of the batch" in report.causes[0].evidence  # row 5 of the data
