"""Draws text from a language model, one token per step.

The host draws in float64. Each call makes its own generator from the seed. The same seed therefore
gives the same text, whatever was drawn before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfwd.lm.config import TOKENS
from tfwd.lm.data.splits_and_tokens import EOS, detokenize, tokenize
from tfwd.lm.data.vocabulary import Vocabulary
from tfwd.runs.errors import UserError

if TYPE_CHECKING:
    from tfwd.lm.model import LanguageModel


def generate(
    model: LanguageModel,
    vocabulary: Vocabulary,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    prompt: str = "",
) -> str:
    """Draws a text from a language model.

    Each token is drawn with the probability `softmax(logits / temperature)` among the `top_k` most
    likely tokens, and is the model's next input. `<unk>` is never drawn, because it is not a word.

    Args:
        model: the model. It runs with `training=False`.
        vocabulary: the model's vocabulary.
        tokens: int. The number of tokens to draw, at least 0 and at most a million.
        temperature: float. A value below 1 makes likely tokens more probable. A value above 1 makes
            unlikely tokens more probable. 0 takes the most likely token.
        top_k: int. The number of most likely tokens to draw from; 0 draws from all.
        seed: int, at least 0. Equal arguments give equal texts.
        prompt: str. The text to continue. Unknown tokens are read as `<unk>`, and are unchanged in
            the result. Without a prompt, the text starts at the beginning of a line.

    Returns:
        The prompt, joined from its tokens, and the drawn text.

    Raises:
        UserError: an argument is out of its range, or the model's outputs are not finite.

    Example:
    >>> from tfwd.lm.model import LanguageModel
    >>> vocabulary = Vocabulary.from_tokens("to be or not to be <eos>".split(), "word")
    >>> model = LanguageModel(len(vocabulary), embedding_dim=4, hidden_units=(4,), seed=0)
    >>> text = generate(model, vocabulary, tokens=5, prompt="to be")
    >>> text.startswith("to be")
    True
    """
    check_options(tokens, temperature, top_k, seed)
    given = tokenize(prompt, vocabulary.level)
    if given and given[-1] == EOS and vocabulary.level == "word" and not prompt.endswith("\n"):
        del given[-1]  # the line has not ended: the model continues it
    start = vocabulary.encode(given) if given else np.array([_line_end(vocabulary)], np.int32)
    drawn = draw(
        model,
        start,
        tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        never=(vocabulary.unk_id,),
    )
    return detokenize(given + vocabulary.decode(drawn), vocabulary.level)


def check_options(tokens: int, temperature: float, top_k: int, seed: int) -> None:
    """Raises a `UserError` unless the options of `generate` are in their ranges."""
    for name, value in (("tokens", tokens), ("top_k", top_k), ("seed", seed)):
        if value < 0:
            raise UserError(f"{name}={value}: give a whole number, at least 0")
    if not TOKENS.is_valid(tokens):
        raise UserError(f"tokens={tokens}: give {TOKENS.expected}")
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature={temperature}: give a number, at least 0")


def draw(
    model: LanguageModel,
    start: np.ndarray,
    tokens: int,
    *,
    temperature: float,
    top_k: int,
    seed: int,
    never: tuple[int, ...] = (),
) -> Iterator[int]:
    """Yields the ids of the tokens drawn after `start`; see `generate`.

    Args:
        model: the model.
        start: the token ids that the model reads first. At least one id.
        tokens: int. The number of tokens to draw.
        temperature: as in `generate`.
        top_k: as in `generate`.
        seed: as in `generate`.
        never: token ids that are never drawn.
    """
    generator = np.random.default_rng(seed)
    window = tf.TensorSpec([1, None], tf.int32)
    states = model.zero_state(1)
    specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), states)

    @tf.function(input_signature=[window, specs])
    def step(ids: tf.Tensor, states: list) -> tuple[tf.Tensor, list]:
        output = model(ids, states=states, training=False)
        return output.logits[0, -1], output.states

    ids = np.asarray(start, np.int32)[None]
    for _ in range(tokens):
        logits, states = step(tf.constant(ids), states)
        scores = logits.numpy()
        if not np.isfinite(scores.astype(np.float32)).all():
            raise UserError(
                "the model's outputs for the next token are not finite: its weights are not "
                "finite, or too large for its dtype policy"
            )
        token = choose(scores, generator, temperature, top_k, never)
        ids = np.array([[token]], np.int32)
        yield token


def choose(
    logits: np.ndarray,
    generator: np.random.Generator,
    temperature: float,
    top_k: int = 0,
    never: tuple[int, ...] = (),
) -> int:
    """Draws one token from `softmax(logits / temperature)`.

    Args:
        logits: `[vocabulary]`.
        generator: the random generator. It is not used at temperature 0.
        temperature: float, at least 0. 0 takes the most likely token. If several tokens are equally
            likely, it takes the first.
        top_k: int. The number of most likely tokens to draw from; 0 draws from all. Among equally
            likely tokens, the first tokens are included.
        never: token ids that are never drawn.

    Example:
    >>> choose(np.array([1.0, 3.0, 2.0]), np.random.default_rng(0), 0.0, never=(1,))
    2
    """
    scores = np.array(logits, np.float64)
    scores[list(never)] = -np.inf
    if temperature == 0:
        return int(np.argmax(scores))
    if 0 < top_k < len(scores):
        scores[np.argsort(-scores, kind="stable")[top_k:]] = -np.inf
    # Subtract the largest before the division, because a small temperature must not overflow.
    with np.errstate(over="ignore"):
        weights = np.exp((scores - np.max(scores)) / temperature)
    return int(generator.choice(len(weights), p=weights / weights.sum()))


def _line_end(vocabulary: Vocabulary) -> int:
    """Returns the id of the token before a line. The model predicts the first token from it."""
    if vocabulary.eos_id is not None:
        return vocabulary.eos_id
    return int(vocabulary.encode(["\n"])[0])
