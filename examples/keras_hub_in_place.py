"""Weight dropout in a keras-hub classifier, which keeps its `fit`, preprocessing and file format.

    python examples/keras_hub_in_place.py

The model is small and its weights are random. A published model works in the same way:
`keras_hub.models.BertTextClassifier.from_preset(...)`.
"""

import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
from matplotlib.figure import Figure

import tfwd
from tfwd import parametrizations as P

try:
    import keras_hub
    import tensorflow_text  # noqa: F401  # keras-hub tokenizes with it
except ImportError:
    # Without --no-deps, pip would install a second build of TensorFlow beside tensorflow-cpu.
    sys.exit(
        "this example needs: "
        "pip install --no-deps keras-hub tensorflow-text kagglehub kagglesdk regex sentencepiece"
    )

WORDS = ["the", "a", "film", "plot", "cast", "and", "was", "great", "moving", "awful", "dull"]
GOOD, BAD = ("great", "moving"), ("awful", "dull")


def texts(count: int, seed: int) -> tuple[list[str], np.ndarray]:
    """Returns short reviews, and 1 for each review with a good word."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    verdicts = [rng.choice(GOOD if label else BAD) for label in labels]
    subjects = rng.choice(["the film", "a plot", "the cast and the plot"], count)
    return [f"{one} was {two}" for one, two in zip(subjects, verdicts, strict=True)], labels


def make_classifier() -> keras_hub.models.BertTextClassifier:
    """Returns a classifier. keras-hub compiles it."""
    tokenizer = keras_hub.models.BertTokenizer(
        vocabulary=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    )
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=tokenizer.vocabulary_size(),
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        intermediate_dim=64,
        max_sequence_length=10,
    )
    return keras_hub.models.BertTextClassifier(
        backbone=backbone,
        num_classes=2,
        preprocessor=keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=10),
    )


def main(folder: str | Path = ".", epochs: int = 6) -> float:
    """Trains, saves and loads, and returns the accuracy on new texts."""
    keras.utils.set_random_seed(0)
    classifier = make_classifier()
    classifier.optimizer.learning_rate = 3e-3
    parts = {"(query|key|value)/kernel": P.Dropout(0.1), "token_embedding/.*": P.Dropout(0.05)}
    tfwd.parametrize(classifier, parts, seed=1, in_place=True)
    print(tfwd.parametrizations.table(classifier))
    fit = classifier.fit(*texts(1000, 1), batch_size=50, epochs=epochs, shuffle=False, verbose=0)
    figure = Figure((6, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, epochs + 1), fit.history["loss"])
    axes.set(xlabel="epoch", ylabel="loss", ylim=(0, None))
    figure.savefig(Path(folder, "keras_hub_in_place.png"), dpi=120)

    tfwd.unwrap(classifier)
    file = Path(tempfile.mkdtemp(), "plain.keras")
    classifier.save(file)
    plain = keras.saving.load_model(file, compile=False)  # needs no tfwd
    plain.compile()
    new, labels = texts(200, 2)
    accuracy = float((plain.predict(new, verbose=0).argmax(1) == labels).mean())
    print(f"\naccuracy on new texts, of the plain model from the file: {accuracy:.2f}")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:])
