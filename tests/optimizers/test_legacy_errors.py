"""Decay of legacy optimizers: errors and their reasons."""

import pytest
from optimizer_tools import gradients, model, variables

from tfwd.optimizers import DecoupledWeightDecay, NonMonotonicASGD

tfa = pytest.importorskip("tensorflow_addons", reason="tensorflow-addons is on the other stack")
from addons_optimizers_table import D, LossScale, legacy  # noqa: E402


@pytest.mark.parametrize(
    "inner",
    [
        lambda: tfa.optimizers.LAMB(weight_decay=0.1),
        lambda: tfa.optimizers.AdamW(0.1),
        lambda: tfa.optimizers.RectifiedAdam(weight_decay=0.1),
        lambda: tfa.optimizers.Lookahead(tfa.optimizers.SGDW(0.1)),
        lambda: tfa.optimizers.SWA(DecoupledWeightDecay(legacy.SGD(), 0.1)),
        lambda: LossScale(tfa.optimizers.NovoGrad(weight_decay=0.1)),
    ],
)
def test_what_decays_already_is_refused(inner):
    with pytest.raises(ValueError, match="already decays weights .*weight_decay"):
        DecoupledWeightDecay(inner(), 0.1)


@pytest.mark.parametrize("scale", ["learning_rate", "schedule"])
def test_cocob_has_no_learning_rate(scale):
    with pytest.raises(ValueError, match="COCOB 'COCOB' has no learning rate: use scale='abs"):
        DecoupledWeightDecay(tfa.optimizers.COCOB(), D, scale=scale)


def test_an_optimizer_of_several_is_refused():
    net = model()
    several = tfa.optimizers.MultiOptimizer([(legacy.SGD(), net.layers[0])])
    with pytest.raises(TypeError, match="cannot follow the updates of MultiOptimizer"):
        DecoupledWeightDecay(several, D)


def test_what_cannot_be_inside_an_average_says_so():
    grads, weights = gradients(0, "float32"), variables("float32")
    unused = DecoupledWeightDecay(legacy.SGD(), D, decay_unused=True)
    for inner, words in (
        (unused, "decay_unused=True needs all variables at once: put DecoupledWeightDecay around"),
        (NonMonotonicASGD(legacy.SGD()), "put NonMonotonicASGD around the average"),
    ):
        optimizer = tfa.optimizers.Lookahead(inner)
        with pytest.raises(ValueError, match=words):
            optimizer.apply_gradients(zip(grads, weights, strict=True))


def test_unused_variables_are_unknown_under_a_loss_scale():
    optimizer = DecoupledWeightDecay(legacy.SGD(), D, decay_unused=True)
    with pytest.raises(ValueError, match="put the loss scale inside DecoupledWeightDecay"):
        LossScale(optimizer)


def test_a_pattern_that_matches_nothing_lists_the_paths():
    optimizer, weights = DecoupledWeightDecay(legacy.Adam(), D, exclude="gamma"), variables()
    with pytest.raises(ValueError, match="exclude pattern 'gamma' matches no variable; .*: kernel"):
        optimizer.apply(gradients(0), weights)
    assert not optimizer.built and not optimizer.optimizer.weights
