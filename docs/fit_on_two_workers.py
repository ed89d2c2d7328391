"""Trains a model on two workers: python fit_on_two_workers.py 0, then the same with 1."""

import json
import os
import sys

index = int(sys.argv[1])
addresses = sys.argv[2:] or ["127.0.0.1:12345", "127.0.0.1:12346"]
task = {"type": "worker", "index": index}
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tfwd  # noqa: E402

strategy = tf.distribute.MultiWorkerMirroredStrategy()

with tfwd.distribute.scope(strategy):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu")])
    model.add(keras.layers.Dense(1))
    model.compile(keras.optimizers.Adam(0.01), "mse")

x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)
history = model.fit(x, y, batch_size=32, epochs=3, verbose=0)
print(f"loss {history.history['loss'][-1]:.6f}")
