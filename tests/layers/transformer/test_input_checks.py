"""Ids and masks: in a dict or by name, and errors instead of wrong numbers."""

import collections

import keras
import numpy as np
import numpy_encoders as by_hand
import pytest
import tensorflow as tf
from stack_marks import extended, quick_rows

import tfwd
from tfwd import _keras, parametrizations
from tfwd.layers import transformer as T
from tfwd.layers.transformer.input_checks import InputChecks

IDS = np.array([[5, 6, 7, 8, 0], [3, 4, 0, 0, 0]])
TYPES = np.array([[0, 0, 1, 1, 0], [0, 1, 0, 0, 0]])
MASK = (IDS != 0).astype("int64")
ENCODING = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": TYPES}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Returns a BERT, and NumPy's results for the ids and types with the mask."""
    folder = tmp_path_factory.mktemp("bert")
    config, tensors = by_hand.publish(folder)
    seen = MASK[:, None].repeat(5, 1)
    return T.Bert.from_pretrained(folder), by_hand.encode(config, tensors, IDS, seen, TYPES)[0]


def close(ours, theirs):
    where = MASK.astype(bool)
    np.testing.assert_allclose(np.asarray(ours)[where], theirs[where], rtol=1e-4, atol=1e-4)


class BatchEncoding(collections.UserDict):
    """A mapping that is no dict, as Hugging Face's class of this name."""


@pytest.mark.parametrize(
    "given",
    [
        ENCODING,
        BatchEncoding(ENCODING),
        {"token_ids": IDS, "padding_mask": MASK.astype(bool), "segment_ids": TYPES},
        {"input_ids": IDS, "token_type_ids": TYPES},
    ],
)
def test_dicts_of_tokenizers(published, given):
    bert, expected = published
    close(bert(given), expected)
    close(bert({"input_ids": IDS}, token_type_ids=TYPES, mask=MASK), expected)
    close(bert(IDS, token_type_ids=TYPES, mask=MASK), expected)


def test_names_of_a_tokenizer_as_arguments(published):
    bert, expected = published
    close(bert(**ENCODING), expected)
    close(bert(IDS, attention_mask=MASK, token_type_ids=TYPES), expected)


def test_lists_of_a_tokenizer(published):
    bert, _ = published
    with pytest.raises(TypeError, match="Bert 'bert.*': input_ids is a list: pass a tensor"):
        bert({key: value.tolist() for key, value in ENCODING.items()})


def test_a_functional_model_of_a_dict(published, tmp_path):
    bert, expected = published
    inputs = {key: keras.Input((None,), dtype="int32", name=key) for key in ENCODING}
    hidden = bert(inputs)
    assert tuple(hidden.shape) == (None, None, 12)
    model = keras.Model(inputs, hidden)
    close(model(ENCODING), expected)
    close(model.predict(ENCODING, verbose=0), expected)
    model.save(tmp_path / "model.keras")
    close(keras.models.load_model(tmp_path / "model.keras")(ENCODING), expected)


def test_models_of_the_former_names(published):
    """Checks files that hold former names of the call's arguments."""
    bert, expected = published
    close(bert(IDS, type_ids=TYPES), expected)
    t5 = T.T5(20, 1, 2, 3, 8, 12)
    np.testing.assert_allclose(t5(IDS, decoder_ids=TYPES), t5(IDS, TYPES), rtol=1e-5)


def test_t5_takes_a_dict():
    t5 = T.T5(20, 1, 2, 3, 8, 12)
    labels = np.array([[4, 5], [6, 7]])
    given = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": labels}
    np.testing.assert_allclose(t5(given), t5(IDS, labels, mask=MASK), rtol=1e-5)
    np.testing.assert_allclose(t5(IDS, decoder_input_ids=labels), t5(IDS, labels), rtol=1e-5)
    inputs = {key: keras.Input((None,), dtype="int32", name=key) for key in given}
    outputs = t5(inputs)
    assert tuple(outputs.shape) == (None, None, 20)
    np.testing.assert_allclose(keras.Model(inputs, outputs)(given), t5(given), rtol=1e-5)
    with pytest.raises(ValueError, match="needs decoder_input_ids: pass the tokens before the"):
        t5({"input_ids": IDS})


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (
            (IDS, MASK),
            {},
            "2 positional arguments: pass .* by name, as token_ty",
        ),
        (([[5, 6, 7]],), {}, "ids is a list: pass a tensor or an array"),
        ((IDS,), {"mask": MASK.tolist()}, "mask is a list: pass a tensor or an array"),
        ((IDS,), {"mask": (1 - MASK) * -1e4}, "mask must be boolean, or zeros and ones, with 1 f"),
        (
            (IDS,),
            {"mask": MASK * 2},
            "An additive mask, .* is wrong: pass the mask itself. Its smallest",
        ),
        (
            (IDS,),
            {"mask": MASK[:, :4]},
            r"mask has the shape \[2, 4\], but the input .* \[2, 5, 12",
        ),
        (
            (IDS,),
            {"mask": MASK[:, :1]},
            r"mask has the shape \[2, 1\], but the input .* \[2, 5, 12",
        ),
        ((IDS,), {"mask": MASK[0]}, r"mask has the shape \[5\]: expected \[batch, length\], or"),
        ((IDS,), {"mask": MASK[:, None, None]}, r"mask has the shape \[2, 1, 1, 5\]: exp"),
        (
            (IDS,),
            {"mask": np.ones((2, 3, 5))},
            r"mask has the shape \[2, 3, 5\], but",
        ),
        ((IDS[0],), {}, r"ids has the shape \[5\]: expected \[batch, length\]"),
        ((IDS - 1,), {}, "ids must be from 0 to 19, but has values from -1 to 7"),
        ((IDS + 12,), {}, "ids must be from 0 to 19, but has values from 12 to 20"),
        (
            (IDS.astype("float16"),),
            {},
            "ids has the dtype float16: expected integers. Pass a mask as",
        ),
        (({"input_ids": tf.cast(IDS, tf.bfloat16)},), {}, "input_ids has the dtype bfloat16: ex"),
        (
            (IDS > 3,),
            {},
            "ids has the dtype bool: expected integers. Pass a mask as",
        ),
        ((IDS + 0.5,), {}, r"ids must be whole numbers, but begins with \[5.5, 6.5, "),
        ((IDS * np.nan,), {}, r"ids must be whole numbers, but begins with \[nan"),
        ((IDS - 1.0,), {}, "ids must be from 0 to 19, but has values from -1.0 to 7.0"),
        ((tf.RaggedTensor.from_tensor(IDS),), {}, "ids is a RaggedTensor: .* by to_tensor"),
        ((IDS,), {"token_type_ids": TYPES + 1}, "token_type_ids must be from 0 to 1, but has val"),
        ((IDS,), {"token_type_ids": TYPES[:, :2]}, r"token_type_ids has the shape \[2, 2\], but"),
        ((IDS,), {"position_ids": IDS + 5}, "position_ids must be from 0 to 11, but has values f"),
        (
            (np.ones((1, 13), int),),
            {},
            "has positions for 12 tokens: .* have 13",
        ),
        (({**ENCODING, "labels": IDS},), {}, "the inputs have the unknown key 'labels'"),
        (({"attention_mask": MASK},), {}, "the inputs need 'input_ids', but have 'attention_mask'"),
        ((ENCODING,), {"mask": MASK}, "mask is given twice, once as 'attention_mask'"),
    ],
)
def test_wrong_inputs_are_refused(published, args, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        published[0](*args, **options)


@extended
def test_ids_that_keras_made_floats(tmp_path):
    """Checks ids in a Sequential without an Input, and in an Input without a dtype: float32."""
    config, tensors = by_hand.publish(tmp_path)
    bert, seen = T.Bert.from_pretrained(tmp_path), MASK[:, None].repeat(5, 1)
    expected = by_hand.encode(config, tensors, IDS, seen, np.zeros_like(IDS))[0]
    close(keras.Sequential([bert]).predict(IDS, verbose=0), expected)
    inputs = keras.Input((5,))
    close(keras.Model(inputs, bert(inputs)).predict(IDS, verbose=0), expected)
    expected = by_hand.encode(config, tensors, IDS, seen, TYPES)[0]
    close(bert(IDS.astype("float64"), token_type_ids=TYPES.astype("float32")), expected)
    t5 = T.T5(20, 1, 2, 3, 8, 12)
    np.testing.assert_allclose(t5(IDS + 0.0, TYPES + 0.0), t5(IDS, TYPES), rtol=1e-5)


def test_floats_that_cannot_hold_all_ids_are_refused():
    """Checks ids between 2**24 and 2**25, where float32 has only even numbers."""
    ids = np.array([[1.0]], "float32")
    with pytest.raises(TypeError, match="ids has the dtype float32: expected integers"):
        InputChecks(keras.layers.Layer()).ids("ids", ids, below=2**24 + 1)
    assert InputChecks(keras.layers.Layer()).ids("ids", ids, below=2**24).dtype == tf.int32
    half = T.Embeddings(20, 4, dtype="mixed_float16")
    with pytest.raises(TypeError, match="ids has the dtype float16: expected integers"):
        half(IDS.astype("float32"))


WRONG = {
    "additive mask": {"mask": ((1 - MASK) * -1e4).astype("float32")},
    "id of -1": {"ids": IDS - 1},
    "id beyond the table": {"ids": IDS + 15},
    "half an id": {"ids": IDS + 0.5},
    "type beyond the table": {"token_type_ids": TYPES + 1},
    "short mask": {"mask": MASK[:, :1]},
    "long text": {"ids": np.ones((1, 13), int)},
}


@quick_rows(
    "True-id beyond the table",
    "True-additive mask",
    "False-half an id",
    "False-short mask",
    "False-id of -1",
)
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_wrong_values_in_graphs(published, what, jit_compile):
    """Checks that a graph raises, and that XLA's output is NaN, not a wrong number.

    Tracing does not know the shapes.
    """
    bert, expected = published
    given = {"ids": IDS, "token_type_ids": TYPES, "mask": MASK}

    @tf.function(jit_compile=jit_compile, reduce_retracing=True)
    def run(ids, options):
        return bert(ids, **options)

    def specs(values):
        tensors = {key: tf.constant(value) for key, value in values.items()}
        shapes = {k: tf.TensorSpec([None, None], v.dtype) for k, v in tensors.items()}
        ids = shapes.pop("ids")
        return run.get_concrete_function(ids, shapes), tensors.pop("ids"), tensors

    if what == "long text":
        given = {"ids": IDS}
    function, ids, options = specs({**given})
    if what != "long text":
        close(function(ids, options), expected)
    function, ids, options = specs({**given, **WRONG[what]})
    if jit_compile:
        assert np.isnan(function(ids, options)).all()
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="must be|has positions for 12"):
            function(ids, options)


def test_a_mask_of_each_query_is_not_handed_on(published):
    """Checks that a mask of queries and keys is not passed on as Keras's mask of positions."""
    bert, _ = published
    seen = np.tril(np.ones((2, 5, 5), bool))
    for hidden in (bert(IDS, mask=seen), bert.stack(tf.ones([2, 5, 12]), mask=seen)[-1]):
        mask = _keras.layers.get_mask(hidden)
        assert mask is None or mask.shape == (2, 5)
        assert keras.layers.GlobalAveragePooling1D()(hidden).shape == (2, 12)
    layer = T.TransformerLayer(2, 8, 8)
    hidden = layer(tf.ones([2, 5, 8]), mask=seen)
    assert keras.layers.GlobalAveragePooling1D()(hidden).shape == (2, 8)


def test_layers_alone_check_their_masks():
    x, wrong = tf.ones([2, 5, 8]), (1.0 - MASK) * -1e4
    sizes = {"num_heads": 2, "hidden_size": 8, "intermediate_size": 8}
    stack = T.TransformerStack(1, **sizes)
    with pytest.raises(ValueError, match="TransformerStack '.*': mask must be boolean"):
        stack(x, mask=wrong)
    with pytest.raises(ValueError, match="SelfAttention 'attention': mask must be boolean"):
        T.TransformerLayer(**sizes)(x, mask=wrong)
    with pytest.raises(ValueError, match="Attention '.*': context_mask must be boolean"):
        T.Attention(2, 4, 8)(x, x + 1.0, context_mask=wrong)
    both = T.BiModalEncoder(stack, T.TransformerStack(1, **sizes), connections=[(1, 1)])
    with pytest.raises(ValueError, match="second_mask must be boolean"):
        both(x, x, second_mask=wrong)
    t5 = T.T5(20, 1, 2, 3, 8, 12)
    with pytest.raises(ValueError, match="T5 '.*': decoder_mask must be boolean"):
        t5(IDS, IDS, decoder_mask=wrong)
    with pytest.raises(ValueError, match="T5 '.*': decoder_input_ids must be from 0 to 19, but"):
        t5(IDS, IDS - 100)
    with pytest.raises(TypeError, match="3 positional arguments: pass the arguments after"):
        t5(IDS, MASK, IDS)


@extended
def test_checks_do_not_keep_a_layer_from_being_recomputed(published):
    """Checks that assertions do not prevent recomputation: they draw and assign nothing."""
    bert, _ = published
    wrapped = tfwd.layers.Parametrized(bert, {".*/kernel": parametrizations.Dropout(0.5)}, seed=1)

    @tf.function
    def step(ids, mask):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(wrapped(ids, mask=mask, training=True) ** 2)
        return tape.gradient(loss, [_keras.variables.tf_variable(bert.weights[0])])[0]

    gradient = tf.convert_to_tensor(step(tf.constant(IDS), tf.constant(MASK)))
    assert np.isfinite(gradient).all() and np.any(gradient)
    analyses = wrapped._call_cache.analyses.values()
    assert analyses and not any(analysis.impure for analysis in analyses)
