"""`EinsumDense` layers that flatten an image, or make one. The oracle is PyTorch's formula."""

import keras
import numpy as np
import pytest
from flattened_images import KERNEL, LINEAR, X, convolution, convolved, linear, saved, sequential

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers


def einsum(equation, shape, bias="o", name="f"):
    return layers.EinsumDense(equation, shape, bias_axes=bias, name=name)


@pytest.mark.parametrize(
    ("equation", "before"),
    [
        ("bhwc,hwco->bo", ()),
        ("bhwc,chow->bo", ()),  # the kernel has its axes in another order
        ("bi,io->bo", (layers.Flatten,)),
        ("bi,oi->bo", (layers.Flatten,)),
    ],
)
def test_an_einsum_flattens_an_image(equation, before, tmp_path):
    model = sequential(
        *(keras.Input((5, 4, 3)), convolution(), *(make() for make in before)),
        einsum(equation, 6),
    )
    load(model, saved(tmp_path, KERNEL, LINEAR), mapping={"c": "c", "f": "f"})
    expected = linear(convolved(X).reshape(2, -1))
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-4)


def test_an_einsum_flattens_channels_over_time(tmp_path):
    """Checks `fc(conv(x).flatten(1))` of PyTorch, with a `Conv1d` of width 1."""
    weight, matrix, x = (
        RNG.normal(size=(5, 3, 1)),
        RNG.normal(size=(2, 20)),
        RNG.normal(size=(2, 4, 3)),
    )
    model = sequential(
        *(keras.Input((4, 3)), layers.Conv1D(5, 1, use_bias=False, name="c")),
        layers.EinsumDense("btc,tco->bo", 2, name="f"),
    )
    folder = saved(tmp_path, {"c.weight": weight, "f.weight": matrix})
    load(model, folder, mapping={"c": "c", "f": "f"})
    image = np.einsum("nti,oi->not", x, weight[:, :, 0])
    expected = image.reshape(2, -1) @ matrix.T
    np.testing.assert_allclose(model(x.astype("float32")), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("equation", "before", "message"),
    [
        ("bhwc,wco->bho", convolution, r"'f' sums over several axes of an image of \(4, 3, 4\)"),
        ("bhwc,hwco->bo", layers.ReLU, r"the model does not show what the axes of \(4, 3, 5\)"),
    ],
)
def test_the_order_of_the_summed_axes_is_unknown(equation, before, message, tmp_path):
    shape = (5, 4, 3) if before is convolution else (4, 3, 5)
    size = 12 if before is convolution else 60
    model = sequential(keras.Input(shape), before(), einsum(equation, 6 if size == 60 else (4, 6)))
    weight, bias = RNG.normal(size=(6, size)), RNG.normal(size=6)
    saved(tmp_path, KERNEL, {"f.weight": weight, "f.bias": bias})
    mapping = {"c": "c"} if before is convolution else {}
    ignore = () if mapping else "c.*"
    with pytest.raises(PlanError, match=message) as caught:
        load(model, tmp_path, mapping={**mapping, "f": "f"}, ignore=ignore)
    assert "map to Key('f', flattened=(" in str(caught.value)
    with pytest.raises(PlanError, match="entries: give the shape in PyTorch"):
        key = Key("f", flattened=(5, 7))
        load(model, tmp_path, mapping={**mapping, "f": key}, ignore=ignore)
    if before is convolution:  # PyTorch flattens the columns of each row
        load(model, tmp_path, mapping={**mapping, "f": Key("f", flattened=(4, 3))})
        rows = convolved(X).transpose(0, 2, 1, 3).reshape(2, 4, 12)
        np.testing.assert_allclose(model(X), rows @ weight.T + bias, rtol=1e-4, atol=1e-4)
        return
    x = RNG.uniform(size=(2, 4, 3, 5))
    for shape, image in (((5, 4, 3), np.moveaxis(x, -1, 1)), ((), x)):
        key = Key("f", flattened=shape)
        load(model, tmp_path, mapping={"f": key}, ignore=ignore)
        expected = image.reshape(2, -1) @ weight.T + bias
        np.testing.assert_allclose(model(x.astype("float32")), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("style", ["weight", "kernel"])
@pytest.mark.parametrize("equation", ["bi,ihwc->bhwc", "bi,hciw->bhwc"])
def test_an_einsum_makes_an_image(equation, style, tmp_path):
    """Checks `view(channels, height, width)` of PyTorch, then a 1 x 1 convolution."""
    w, b, x = RNG.normal(size=(24, 5)), RNG.normal(size=24), RNG.normal(size=(2, 5))
    point = RNG.normal(size=(2, 3, 1, 1))
    model = sequential(
        *(keras.Input((5,)), einsum(equation, (4, 2, 3), bias="hwc", name="d"), layers.ReLU()),
        layers.Conv2D(2, 1, name="p", use_bias=False),
    )
    image = np.maximum((x @ w.T + b).reshape(2, 3, 4, 2), 0)
    tensors = {"d.weight": w, "d.bias": b}
    if style == "kernel":  # a file in Keras's order, also of the biases
        kernel = np.einsum("chwi->ihwc", w.reshape(3, 4, 2, 5))
        kernel = kernel if equation.startswith("bi,i") else np.einsum("ihwc->hciw", kernel)
        tensors = {"d.kernel": kernel, "d.bias": np.moveaxis(b.reshape(3, 4, 2), 0, -1)}
    folder = saved(tmp_path, tensors, {"p.weight": point})
    load(model, folder, mapping={"d": "d", "p": "p"})
    expected = np.einsum("nchw,oc->nhwo", image, point[:, :, 0, 0])
    np.testing.assert_allclose(model(x.astype("float32")), expected, rtol=1e-4, atol=1e-4)


def test_the_order_of_a_part_of_an_image_is_unknown(tmp_path):
    model = sequential(
        keras.Input((4, 5)),
        layers.EinsumDense("bhi,iwc->bhwc", (4, 2, 3), name="d"),
        layers.Conv2D(2, 1, name="p", use_bias=False),
    )
    point = {"p.weight": RNG.normal(size=(2, 3, 1, 1))}
    saved(tmp_path, {"d.weight": RNG.normal(size=(6, 5))}, point)
    message = r"'d/kernel': its outputs become an image after 'd'.*map to Key\('d', transposed=Fal"
    with pytest.raises(PlanError, match=message):
        load(model, tmp_path, mapping={"d": "d", "p": "p"})


def test_an_einsum_on_the_channels_of_an_image(tmp_path):
    """Checks that the order of a later flatten is unknown, as behind a `Dense` layer."""
    model = sequential(
        *(
            keras.Input((5, 4, 3)),
            convolution(),
            layers.EinsumDense("bhwc,cd->bhwd", (4, 3, 4), name="e"),
        ),
        *(layers.Flatten(), layers.Dense(6, name="f")),
    )
    saved(tmp_path, KERNEL, LINEAR, {"e.weight": RNG.normal(size=(4, 4))})
    with pytest.raises(PlanError, match="'f/kernel': 'e' is on some axes of an image of"):
        load(model, tmp_path, mapping={"c": "c", "e": "e", "f": "f"})
