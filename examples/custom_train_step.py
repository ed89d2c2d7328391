"""Weight dropout in a variational autoencoder, which has its own class, `train_step` and methods.

    python examples/custom_train_step.py

The model stays the same object. Its own `train_step` trains it. Its files equal the plain model's
files.
"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

import tfwd
from tfwd import parametrizations as P


@keras.saving.register_keras_serializable("examples")
class Autoencoder(keras.Model):
    """A variational autoencoder for rows with `width` numbers. It contains no code for tfwd."""

    def __init__(self, width: int, latent: int = 3, **kwargs) -> None:
        super().__init__(**kwargs)
        self.width, self.latent = width, latent
        self.encoder = keras.Sequential(
            [keras.layers.Dense(64, "relu"), keras.layers.Dense(2 * latent)], name="encoder"
        )
        self.decoder = keras.Sequential(
            [keras.layers.Dense(64, "relu"), keras.layers.Dense(width)], name="decoder"
        )
        self.loss_mean = keras.metrics.Mean(name="loss")

    def call(self, x, training=False):
        mean, log_variance = tf.split(self.encoder(x, training=training), 2, axis=1)
        if training:
            mean += tf.exp(log_variance / 2) * tf.random.normal(tf.shape(mean))
        return self.decoder(mean, training=training), mean, log_variance

    def train_step(self, data):
        with tf.GradientTape() as tape:
            rebuilt, mean, log_variance = self(data, training=True)
            distance = mean**2 + tf.exp(log_variance) - 1 - log_variance
            loss = tf.reduce_mean((rebuilt - data) ** 2) + 0.005 * tf.reduce_mean(distance)
        variables = [variable.value for variable in self.trainable_variables]
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_mean.update_state(loss)
        return {"loss": self.loss_mean.result()}

    def generate(self, count: int, seed: int = 0) -> np.ndarray:
        """Returns new rows."""
        return self.decoder(tf.random.stateless_normal([count, self.latent], [seed, 0])).numpy()

    def get_config(self):
        return {**super().get_config(), "width": self.width, "latent": self.latent}


def rows(count: int, seed: int, width: int = 16) -> np.ndarray:
    """Returns rows that depend on three numbers, and a little noise."""
    hidden = np.random.default_rng(seed).normal(size=(count, 3))
    mixed = np.tanh(hidden @ np.random.default_rng(0).normal(size=(3, width)))
    noise = np.random.default_rng(seed + 1).normal(size=mixed.shape)
    return (mixed + 0.05 * noise).astype("float32")


def explained(model: Autoencoder, x: np.ndarray) -> float:
    """Returns the share of the variance that the model rebuilds."""
    return float(1 - np.mean((model(x)[0] - x) ** 2) / x.var())


def main(folder: str | Path = ".", epochs: int = 30) -> float:
    """Trains, and returns the share of the variance of new rows that the model rebuilds."""
    keras.utils.set_random_seed(0)
    train, new = rows(2000, 1), rows(500, 3)
    model = Autoencoder(train.shape[1])
    model(train[:1])  # builds it
    model.compile(keras.optimizers.Adam(3e-3))
    tfwd.parametrize(model, {"decoder/.*kernel": P.Dropout(0.05)}, seed=1, in_place=True)
    print(tfwd.parametrizations.table(model))
    losses = model.fit(train, epochs=epochs, batch_size=50, verbose=0).history["loss"]
    print(f"loss of the first epoch {losses[0]:.3f}, of the last {losses[-1]:.3f}")
    print("the first numbers of two new rows:", model.generate(2)[:, :4].round(2), sep="\n")
    tfwd.unwrap(model)  # removes the dropout: `model.save` writes the file of the plain model
    figure = Figure((6, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, epochs + 1), losses)
    axes.set(xlabel="epoch", ylabel="loss", ylim=(0, None))
    figure.savefig(Path(folder, "custom_train_step.png"), dpi=120)
    print(f"share of the variance of new rows: {(share := explained(model, new)):.2f}")
    return share


if __name__ == "__main__":
    main(*sys.argv[1:])
