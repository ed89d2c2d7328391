"""A text classifier with weight dropout: from which part of Python's library is a docstring?

    python examples/text_classifier.py

The texts are docstrings of the installed Python, so the numbers differ slightly between versions.
The same LSTM is trained with and without weight dropout.
"""

import ast
import sys
import sysconfig
import warnings
from pathlib import Path

import keras
import numpy as np
from matplotlib.figure import Figure

import tfwd
from tfwd import parametrizations as P

AREAS = {
    "asyncio": ["asyncio/*.py", "concurrent/*/*.py", "threading.py", "queue.py", "selectors.py"],
    "email": ["email/*.py", "mailbox.py", "smtplib.py", "imaplib.py", "mimetypes.py"],
    "numbers": ["decimal.py", "_pydecimal.py", "fractions.py", "statistics.py", "random.py"],
    "xml": ["xml/*/*.py", "html/*.py", "plistlib.py"],
}


def texts() -> tuple[list[str], np.ndarray]:
    """Returns the shuffled docstrings of at least four words, and the numbers of their areas."""
    library = Path(sysconfig.get_path("stdlib"))
    found: dict[str, int] = {}
    for number, patterns in enumerate(AREAS.values()):
        for file in sorted(file for pattern in patterns for file in library.glob(pattern)):
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(file.read_text("utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    words = (ast.get_docstring(node) or "").split()[:24]
                    if len(words) >= 4:
                        found.setdefault(" ".join(words), number)
    order = np.random.default_rng(0).permutation(len(found))
    return [list(found)[i] for i in order], np.array(list(found.values()))[order]


def make_model(words: int, rate: float) -> keras.Model:
    """Returns a compiled classifier. A rate of 0 leaves it a plain Keras model."""
    model = keras.Sequential(
        [
            keras.Input((24,), dtype="int64"),
            keras.layers.Embedding(words, 64, mask_zero=True),
            keras.layers.Bidirectional(keras.layers.LSTM(64)),
            keras.layers.Dense(len(AREAS), name="area"),
        ]
    )
    if rate:
        drops = {"kernel": P.Dropout(rate), "recurrent_kernel": P.Dropout(rate)}
        drops["embeddings"] = P.Dropout(rate, noise_shape=(None, 1))  # drops whole words
        model = tfwd.parametrize(model, drops, seed=1)
        print(P.table(model), "\n")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


def main(folder: str | Path = ".") -> float:
    """Returns the accuracy of the model with weight dropout on new texts."""
    x, y = texts()
    size = 2 * len(x) // 3
    tokens = keras.layers.TextVectorization(output_sequence_length=24)
    tokens.adapt(x[:size])
    ids = np.asarray(tokens(x))
    print(f"{size} texts for training, {len(x) - size} new texts, {tokens.vocabulary_size()} words")
    figure = Figure((7, 3.5), layout="constrained")
    axes = figure.subplots()
    for rate, colour in ((0.0, "#777777"), (0.3, "#3949ab")):
        keras.utils.set_random_seed(0)
        model = make_model(tokens.vocabulary_size(), rate)
        new = (ids[size:], y[size:])
        epochs = model.fit(ids[:size], y[:size], epochs=12, validation_data=new, verbose=0).history
        loss, accuracy = epochs["val_loss"][-1], epochs["val_accuracy"][-1]
        name = f"weight dropout {rate}" if rate else "plain"
        print(f"{name:<18}  on new texts: loss {loss:.2f}, accuracy {accuracy:.2f}")
        for key, style in (("loss", ":"), ("val_loss", "-")):
            label = f"{name}, {'new texts' if style == '-' else 'training'}"
            axes.plot(range(1, 13), epochs[key], style, color=colour, label=label)
    axes.set(xlabel="epoch", ylabel="loss", ylim=(0, None))
    axes.legend(fontsize=8)
    figure.savefig(Path(folder, "text_classifier.png"), dpi=120)
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:])
