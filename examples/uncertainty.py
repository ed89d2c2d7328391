"""Uncertainty by weight dropout: which predictions of a digit classifier may be wrong?

    python examples/uncertainty.py

The 8 x 8 images are in scikit-learn: pip install scikit-learn.
"""

import sys
from pathlib import Path

import keras
import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import tfwd
from tfwd import parametrizations as P

TRAINING = 300  # images; the other 1,497 are new


def train(x: np.ndarray, y: np.ndarray) -> keras.Model:
    """Returns a model that was trained with dropout on its kernels. It returns probabilities."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, "relu"),
            keras.layers.Dense(256, "relu"),
            keras.layers.Dense(10, "softmax"),
        ]
    )
    model = tfwd.parametrize(model, {"kernel": P.Dropout(0.3)}, seed=1)
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy())
    model.fit(x, y, epochs=60, batch_size=50, verbose=0)
    return model


def doubt(model: keras.Model, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the predicted label of each image, and the spread of its probability over 50 draws.

    The spread is the standard deviation.
    """
    mean, stddev, _ = tfwd.predict_samples(model, x, n=50, batch_size=500, verbose=0)
    answers = mean.argmax(1)
    return answers, stddev[np.arange(len(x)), answers]


def draw(images, answers, spread, labels, right, file: Path) -> None:
    """Draws the accuracy by the share of answered images, and the four most uncertain images."""
    figure = Figure((8, 3.6), layout="constrained")
    left, pictures = figure.subfigures(1, 2)
    axes = left.subplots()
    shares = np.arange(1, len(right) + 1) / len(right)
    axes.plot(100 * shares[50:], 100 * (right.cumsum() / np.arange(1, len(right) + 1))[50:])
    axes.set(xlabel="% of images that are answered, surest first", ylabel="% right answers")
    for axes, i in zip(pictures.subplots(2, 2).flat, spread.argsort()[::-1][:4], strict=True):
        axes.imshow(images[i].reshape(8, 8), cmap="gray_r")
        title = f"answer {answers[i]}, label {labels[i]}, spread {spread[i]:.2f}"
        axes.set_title(title, fontsize=7)
        axes.axis("off")
    figure.savefig(file, dpi=120)


def main(folder: str | Path = ".") -> float:
    """Returns the accuracy on the half of the new images with the smallest spread."""
    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = images / 16
    model = train(images[:TRAINING], labels[:TRAINING])
    images, labels = images[TRAINING:], labels[TRAINING:]

    answers, spread = doubt(model, images)
    right = (answers == labels)[spread.argsort()]  # smallest spread first
    half = len(right) // 2
    print(f"right answers: {right.mean():.1%} of {len(right)} new images")
    print(f"  surer half {right[:half].mean():.1%}, other half {right[half:].mean():.1%}")
    print(
        f"mean spread: right answers {spread[answers == labels].mean():.3f}, "
        f"wrong answers {spread[answers != labels].mean():.3f}"
    )
    turned = np.rot90(images.reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64)
    print(f"  images turned by 90 degrees {doubt(model, turned)[1].mean():.3f}")
    draw(images, answers, spread, labels, right, Path(folder, "uncertainty.png"))
    return float(right[:half].mean())


if __name__ == "__main__":
    main(*sys.argv[1:])
