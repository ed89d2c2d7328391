"""Cases of former defects, as the fuzzer describes them: each must show no difference."""

from fuzz.cases import Case, Mode, Part, Step, Wrap

DROP, NOISE, PARAM = Wrap("drop"), Wrap("noise"), Wrap("param")
FUNCTION, FIT = Mode("function"), Mode("fit")


def _part(kind: str, *wraps: Wrap, held: tuple[Part, ...] = ()) -> Part:
    return Part(kind, wraps, held=held)


def _case(*steps: Step, mode: Mode = FUNCTION, **options) -> Case:
    return Case(steps, mode=mode, **options)


MASKED = Step(_part("MaskedEmbedding", DROP))
DENSE = Step(_part("Dense", DROP))
TWO_DENSE = (_part("Dense"), _part("Dense"))

KNOWN = {
    "self-attention in a graph": _case(DENSE, Step(_part("MultiHeadAttention", DROP))),
    "a model of one tensor twice": _case(DENSE, Step(_part("Siamese", DROP, held=TWO_DENSE))),
    "additive attention of one tensor twice": _case(DENSE, Step(_part("AdditiveAttention", NOISE))),
    "one tensor for both states": _case(DENSE, Step(_part("LSTM", DROP), form=2)),
    "a compiled model wrapped whole": _case(
        Step(_part("Dense")), mode=FIT, top="subclassed", whole=PARAM, compiled=True
    ),
    "a compiled model inside, wrapped": _case(
        Step(_part("Compiled", DROP, held=TWO_DENSE)), mode=FIT
    ),
    "an embedding with a call of its own": _case(Step(_part("OwnCall", DROP)), top="subclassed"),
    "a cell with a call of its own": _case(Step(_part("OwnCell", DROP))),
    "an LSTM whose call was replaced": _case(Step(_part("Doubled", DROP))),
    "an embedding whose call was replaced": _case(Step(_part("DoubledEmbedding", DROP))),
    "a tensor told by an attribute": _case(
        Step(_part("Tells", held=(_part("Reader", DROP),))),
        mode=Mode("eager", untaped=True),
    ),
    "batch normalization by any pattern": _case(Step(_part("AnyBatchNormalization", NOISE))),
    "a static time axis in a loop": _case(Step(_part("LSTM", DROP)), mode=Mode("loop")),
    "a mask and first states": _case(MASKED, Step(_part("LSTM", DROP), form=2)),
    "a mask and a first state": _case(MASKED, Step(_part("GRU", DROP), form=2)),
    "attention twice on one masked tensor": _case(
        MASKED,
        Step(_part("MultiHeadAttention", DROP)),
        Step(_part("MultiHeadAttention", DROP), again=True, args=(1, 1, 0, 0)),
    ),
    "a sublayer built late": _case(
        Step(_part("Late", DROP)), top="subclassed", mode=Mode("eager", fresh=True)
    ),
    "a vector, and a sublayer built late": _case(
        Step(_part("LateVector", DROP)), top="subclassed", mode=Mode("eager", fresh=True)
    ),
    "a sublayer built late, in time": _case(
        Step(_part("LateInTime", DROP)), top="subclassed", mode=Mode("eager", fresh=True)
    ),
    "states made late": _case(
        Step(_part("LSTMStateful")), top="subclassed", whole=PARAM, mode=Mode("eager")
    ),
    "states of two layers made late": _case(
        Step(_part("LSTMStateful", NOISE)),
        Step(_part("LSTMStateful", NOISE, PARAM)),
        top="subclassed",
        whole=PARAM,
        mode=Mode("eager"),
    ),
    "a layer whose call was replaced, in place": _case(Step(_part("OwnCell", DROP)), in_place=True),
    "an embedding with two in place": _case(
        Step(_part("Embedding", NOISE, NOISE)), mode=Mode("eager"), in_place=True
    ),
    "a masked embedding with two in place, and a flag that is a tensor": _case(
        Step(_part("MaskedEmbedding", NOISE, NOISE)),
        mode=Mode("function", tensor_flag=True),
        in_place=True,
    ),
    "one of two equal layers with two in place": _case(
        Step(_part("Functional", DROP, held=(_part("Dense"), _part("Dense", DROP)))),
        mode=Mode("eager"),
        in_place=True,
    ),
    "two in place around own code": _case(
        Step(_part("Twice", PARAM, held=TWO_DENSE)),
        mode=Mode("eager"),
        top="subclassed",
        whole=DROP,
        in_place=True,
    ),
    "a float32 layer in a half one": _case(Step(_part("InTime", held=(_part("Single", DROP),)))),
}
