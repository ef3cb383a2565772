"""How values lie in memory: channels last around convolutions of many channels, and nowhere else."""

from __future__ import annotations

from oocdl.graph.ir.array_layout import Order
from oocdl.graph.ir.graph import Role, Shape
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms.channels_last import channels_last
from oocdl.graph.transforms.factorize import factorize
from oocdl.ops import RULES

LAST = (0, 2, 3, 4, 1)
SPACE = (4, 5, 6)


def orders(build: Builder, *outputs: str) -> dict[str, Order]:
    """Those of the graph's values that do not lie as they are numbered."""
    build.outputs = list(outputs)
    return dict(channels_last(factorize(build.graph(), RULES), RULES).orders)


def conv(build: Builder, x: str, channels: int) -> str:
    """A convolution of width 3 whose weights are named after its result."""
    inside, *space = build.shape(x)[1:]
    rank = len(space)
    weights = build.value(f"w{len(build.values)}", (channels, inside, *(3,) * rank), "float32", Role.WEIGHT)
    ones = (1,) * rank
    return build("Conv", x, weights, strides=ones, dilations=ones, pads=ones * 2)


def start(shape: Shape) -> tuple[Builder, str]:
    build = Builder(RULES)
    return build, build.value("x", shape, "float32", Role.INPUT)


def test_data_of_convolutions_and_what_follows_it_element_by_element() -> None:
    build, x = start((2, 1, *SPACE))
    first = conv(build, x, 8)
    active = build("Relu", first)
    other = build.value("other", (2, 8, *SPACE), "float32", Role.INPUT)
    total = build("Add", build("Sigmoid", active), other)
    second = conv(build, total, 12)
    found = orders(build, second)
    # One channel is not enough; what is added to what lies so lies so, too, wherever it comes from.
    assert found == {name: LAST for name in found}
    assert {first, active, other, total, second} <= found.keys()
    assert "x" not in found
    assert not {value.name for value in build.values.values() if value.role is Role.WEIGHT} & found.keys()


def test_a_batch_of_one_has_no_axis() -> None:
    build, x = start((1, 8, *SPACE))
    assert set(orders(build, conv(build, x, 16)).values()) == {(1, 2, 3, 0)}


def test_too_few_channels_and_odd_numbers_stay_planes() -> None:
    build, x = start((2, 4, *SPACE))
    made = [conv(build, x, channels) for channels in (4, 7, 10, 12)]
    assert orders(build, *made) == {made[-1]: LAST}


def test_images_as_the_engine_likes_them() -> None:
    build, x = start((2, 16, 8, 8))
    build.outputs = [active] = [build("Relu", conv(build, x, 16))]
    factored = factorize(build.graph(), RULES)
    last = (0, 2, 3, 1)
    assert channels_last(factored, RULES).orders[active] == channels_last(factored, RULES).orders[x] == last
    assert channels_last(factored, RULES, (5,)).orders == {}


def test_without_a_convolution_nothing_is_ordered() -> None:
    build, x = start((2, 16, *SPACE))
    assert orders(build, build("Relu", x)) == {}


def test_logits_of_a_cross_entropy_stay_planes() -> None:
    """A LogSumExp runs over the channels of a place, and is faster plane by plane."""
    build, x = start((2, 8, *SPACE))
    logits = conv(build, x, 8)
    total = build("LogSumExp", logits, axes=(1,), keepdims=True)
    loss = build("Sub", logits, total)
    assert orders(build, loss) == {"x": LAST}
    build, x = start((2, 8, *SPACE))
    logits = conv(build, x, 8)
    over_depth = orders(build, build("LogSumExp", logits, axes=(2,), keepdims=True))
    assert over_depth["x"] == over_depth[logits] == LAST


def test_gradients_lie_as_what_they_are_gradients_of() -> None:
    build, x = start((2, 8, *SPACE))
    dy = build.value("dy", (2, 16, *SPACE), "float32", Role.INPUT)
    ones = (1, 1, 1)
    grad = build("ConvWeightGrad", x, dy, kernel_shape=(3, 3, 3), strides=ones, dilations=ones, pads=(1,) * 6)
    assert orders(build, grad) == {"x": LAST, "dy": LAST}
