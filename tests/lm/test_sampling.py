"""Text generation: the distribution, the carried state, and tokens that are never drawn."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from stack_marks import SOAK_ON_KERAS_2, extended

from tfwd.lm.data.splits_and_tokens import tokenize
from tfwd.lm.data.vocabulary import Vocabulary
from tfwd.lm.model import LanguageModel
from tfwd.lm.sampling import choose, draw, generate
from tfwd.runs.errors import UserError

pytestmark = SOAK_ON_KERAS_2

LOGITS = st.lists(st.floats(-50, 50), min_size=3, max_size=12).map(np.array)


@pytest.fixture
def vocabulary():
    return Vocabulary.from_tokens(tokenize("to be or not to be\nthat is the question\n"), "word")


@pytest.fixture
def model(vocabulary):
    made = LanguageModel(
        len(vocabulary),
        6,
        (7, 6),
        tie_weights=False,
        weight_dropout=0.5,
        output_dropout=0.5,
        seed=3,
    )
    made.set_weights(
        [weight * 6 for weight in made.get_weights()]
    )  # so that its probabilities differ
    return made


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [0, 3])
def test_distribution(temperature, top_k):
    logits = np.array([0.3, -1.0, 1.7, 0.9, -0.2, 2.5])
    never = (5,)
    weights = [math.exp(logit / temperature) for logit in logits]
    weights[5] = 0.0
    if top_k:
        weights[1] = weights[4] = 0.0
    count = 4000
    generator = np.random.default_rng(11)
    drawn = [choose(logits, generator, temperature, top_k, never) for _ in range(count)]
    for token, weight in enumerate(weights):
        p = weight / sum(weights)
        error = math.sqrt(p * (1 - p) / count)
        assert abs(drawn.count(token) / count - p) <= 5 * error, token


@given(logits=LOGITS, temperature=st.floats(1e-300, 1e300), top_k=st.integers(0, 15))
def test_any_temperature_draws_a_token_that_is_allowed(logits, temperature, top_k):
    token = choose(logits, np.random.default_rng(0), temperature, top_k, never=(1,))
    assert token != 1
    better = sum(logits[i] > logits[token] for i in range(len(logits)) if i != 1)
    assert better < (top_k or len(logits))


@given(logits=LOGITS)
def test_greedy_is_the_first_of_the_likeliest(logits):
    generator = np.random.default_rng(0)
    assert choose(logits, generator, 0.0) == int(np.argmax(logits))
    assert choose(logits, generator, 1.0, top_k=1) == int(np.argmax(logits))
    # A temperature near 0 gives the same, except for almost equal logits.
    assert logits[choose(logits, generator, 1e-300)] >= logits.max() - 1e-297


def test_carried_state_equals_reading_the_whole_text_again(model, vocabulary):
    start = vocabulary.encode(["to", "be"])
    drawn = list(draw(model, start, 12, temperature=0.0, top_k=0, seed=0, never=(0,)))
    assert len(set(drawn)) > 1
    ids = start.tolist()
    for token in drawn:
        logits = model(tf.constant([ids]), training=False).logits[0, -1].numpy()
        logits[0] = -np.inf
        assert token == np.argmax(logits)
        ids.append(token)


def test_one_seed_one_text(model, vocabulary):
    def write(**options):
        return generate(model, vocabulary, tokens=30, temperature=1.5, **options)

    text = write(seed=5)
    np.random.seed(1)
    keras.utils.set_random_seed(99)
    before = np.random.get_state()[1].copy()
    assert write(seed=5) == text
    assert (np.random.get_state()[1] == before).all()  # no other draws change
    assert len({write(seed=seed) for seed in range(5)}) == 5


def test_unknown_is_never_written(model, vocabulary):
    *others, bias = model.get_weights()
    assert bias.shape == (len(vocabulary),)
    bias[vocabulary.unk_id] = 1000.0
    model.set_weights([*others, bias])
    for temperature in (0.0, 1.0):
        text = generate(model, vocabulary, tokens=50, temperature=temperature)
        assert "<unk>" not in text


@extended
def test_prompt(model, vocabulary):
    def write(prompt, **options):
        return generate(model, vocabulary, temperature=0.0, prompt=prompt, **options)

    assert write("to  be", tokens=0) == "to be"
    assert write("to be\n", tokens=0) == "to be\n"
    assert write("", tokens=0) == ""
    # An open line continues; after a closed line a new line begins.
    go_on = draw(model, vocabulary.encode(["to"]), 3, temperature=0.0, top_k=0, seed=0, never=(0,))
    expected = vocabulary.decode(go_on)
    assert write("to", tokens=3).split() == ["to", *(t for t in expected if t != "<eos>")]
    begun = draw(model, np.array([1]), 3, temperature=0.0, top_k=0, seed=0, never=(0,))
    assert write("", tokens=3).split() == [t for t in vocabulary.decode(begun) if t != "<eos>"]
    # A word that the model does not know is read as <unk> and kept as it is.
    assert write("Hamlet", tokens=4).startswith("Hamlet")
    assert write("Hamlet", tokens=4)[6:] == write("Ophelia", tokens=4)[7:]


@extended
def test_characters():
    for text in ("to be\n", "to be"):  # with and without a line's end in the vocabulary
        vocabulary = Vocabulary.from_tokens(list(text), "char")
        model = LanguageModel(len(vocabulary), 4, (4,), seed=0)
        written = generate(model, vocabulary, tokens=25, prompt="be~")
        assert written.startswith("be~") and len(written) == 28
        assert set(written[3:]) <= set(text)
        assert len(generate(model, vocabulary, tokens=7)) == 7


def test_ranges(model, vocabulary):
    for wrong in ({"tokens": -1}, {"top_k": -1}, {"seed": -1}, {"temperature": -0.1}):
        (name,) = wrong
        with pytest.raises(UserError, match=rf"^{name}=-.*at least 0"):
            generate(model, vocabulary, **wrong)
    with pytest.raises(UserError, match="temperature=nan"):
        generate(model, vocabulary, temperature=float("nan"))
