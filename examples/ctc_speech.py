"""Speech recognition with CTC, and variational noise on all weights.

    python examples/ctc_speech.py

The program generates the "speech". Each letter is a chord of two tones with random length and
loudness, in noise. The noise on the weights starts after ten epochs, when the model already
recognises some letters.
"""

import sys
from pathlib import Path

import keras
import numpy as np
from matplotlib.figure import Figure

from tfwd import layers

LETTERS = "abcdefgh"
RATE, FRAME = 8000, 160  # samples per second, and per frame
FRAMES, LONGEST = 60, 6  # frames of an utterance, and letters of its text
BATCH, STEPS = 32, 12


def utterance(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns the spectrum of a random text, and its letters as numbers from 1. 0 is the blank."""
    text = rng.integers(1, len(LETTERS) + 1, rng.integers(3, LONGEST + 1))
    lengths = rng.integers(5, 9, len(text)) * FRAME
    sound = []
    for letter, length in zip(text, lengths, strict=True):
        pitches = np.array([300 + 90 * letter, 1300 + 150 * (letter * 3 % 8)]) * rng.normal(1, 0.03)
        times = np.arange(length)[:, np.newaxis] / RATE
        sound.append(rng.uniform(0.3, 1) * np.sin(2 * np.pi * pitches * times).sum(1))
        sound.append(np.zeros(rng.integers(0, 3) * FRAME))  # a pause
    samples = np.concatenate([*sound, np.zeros(FRAMES * FRAME)])[: FRAMES * FRAME]
    samples += rng.normal(scale=1.0, size=samples.shape)
    frames = samples.reshape(FRAMES, FRAME) * np.hanning(FRAME)
    spectrum = np.log(0.1 + np.abs(np.fft.rfft(frames))[:, 1:49])
    return spectrum, np.pad(text, (0, LONGEST - len(text)))


def data(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns spectra `[count, FRAMES, 48]` and texts `[count, LONGEST]`."""
    rng = np.random.default_rng(seed)
    spectra, texts = zip(*(utterance(rng) for _ in range(count)), strict=True)
    return np.array(spectra, "float32"), np.array(texts, "int32")


def make_model(stddev: float, start: int) -> keras.Model:
    """Returns a recogniser with noise on all weights and biases, from training call `start` on."""
    lstm = keras.layers.Bidirectional(keras.layers.LSTM(48, return_sequences=True))
    noisy = [
        layers.VariationalNoise(layer, stddev, start_call=start, weights="all", seed=number)
        for number, layer in enumerate([lstm, keras.layers.Dense(len(LETTERS) + 1)])
    ]
    model = keras.Sequential([keras.Input((FRAMES, 48)), keras.layers.LayerNormalization(), *noisy])
    model.compile(keras.optimizers.Adam(5e-3), keras.losses.CTC())
    return model


def errors(logits: np.ndarray, texts: np.ndarray) -> float:
    """Returns the letter error rate: edits between prediction and text, per letter of the text."""
    edits = 0
    for path, text in zip(logits.argmax(-1), texts, strict=True):
        predicted = path[np.flatnonzero(np.diff(path, prepend=0))]
        predicted, label = predicted[predicted > 0], text[text > 0]
        row = np.arange(len(label) + 1)
        for letter in predicted:  # computes the table of edit distances row by row
            above, row = row, [row[0] + 1]
            for i, other in enumerate(label):
                row.append(min(above[i] + (letter != other), above[i + 1] + 1, row[i] + 1))
        edits += row[-1]
    return edits / (texts > 0).sum()


def main(folder: str | Path = ".") -> float:
    """Returns the share of letters that the model with noise recognises in new utterances."""
    x, y = data(BATCH * STEPS, 0)
    new_x, new_y = data(300, 1)
    for stddev in (0.0, 0.075):
        keras.utils.set_random_seed(0)
        model = make_model(stddev, start=10 * STEPS)
        model.fit(x, y, batch_size=BATCH, epochs=30, verbose=0)
        known = errors(model.predict(x, verbose=0), y)
        rate = errors(model.predict(new_x, verbose=0), new_y)
        print(f"noise {stddev:<5}  letter errors: training {known:.1%}, new utterances {rate:.1%}")
    figure = Figure((7, 4.5), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    above.imshow(new_x[0].T, origin="lower", aspect="auto", cmap="viridis")
    above.set(ylabel="frequency", title="".join(LETTERS[n - 1] for n in new_y[0] if n))
    shares = np.exp(model.predict(new_x[:1], verbose=0)[0])
    below.plot(shares / shares.sum(1, keepdims=True), label=["blank", *LETTERS])
    below.set(xlabel="frame", ylabel="probability")
    below.legend(ncols=9, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.2), frameon=False)
    figure.savefig(Path(folder, "ctc_speech.png"), dpi=120)
    return 1 - rate


if __name__ == "__main__":
    main(*sys.argv[1:])
