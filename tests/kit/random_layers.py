"""What random graphs are made of: windows, tables, recurrent layers, attention, CTC."""

from __future__ import annotations

from math import inf, prod
from typing import Any

from oocdl.ops.recurrent import AXES, KINDS
from tests.kit.random_graphs import Maker


def _window(m: Maker, rank: int, most_pad: int) -> dict[str, Any]:
    return {
        "strides": tuple(m.integer(1, 3) for _ in range(rank)),
        "dilations": tuple(m.one(1, 1, 2) for _ in range(rank)),
        "pads": tuple(m.integer(0, most_pad) for _ in range(2 * rank)),
    }


def _kernel(m: Maker, rank: int) -> tuple[int, ...]:
    return tuple(m.integer(1, 3) for _ in range(rank))


def _room(extents: tuple[int, ...], kernel: tuple[int, ...], window: dict[str, Any]) -> bool:
    rank, pads, dilations = len(extents), window["pads"], window["dilations"]
    return all(
        extents[i] + pads[i] + pads[rank + i] >= dilations[i] * (kernel[i] - 1) + 1 for i in range(rank)
    )


def _groups(m: Maker, x: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(axes between batch and channels, channels and space), or None if there is no space."""
    shape = m.shape(x)
    lead = 2 if len(shape) > 3 and not m.integer(0, 2) else 1
    return (shape[1:lead], shape[lead:]) if 1 <= len(shape) - lead - 1 <= 3 else None


def conv(m: Maker, x: str) -> str | None:
    """A convolution, of groups or not, with a bias or not."""
    if (found := _groups(m, x)) is None:
        return None
    groups, (channels, *space) = found
    kernel, window = _kernel(m, len(space)), _window(m, len(space), 2)
    if not _room(tuple(space), kernel, window):
        return None
    if groups:
        window["grouped"] = True
    y = m.build("Conv", x, m.weight(*groups, m.integer(1, 4), channels, *kernel), **window)
    bias = m.weight(1, *m.shape(y)[1 : len(groups) + 2], *(1,) * len(space)) if m.flip() else None
    return m.build("Add", y, bias) if bias else y


def transposed(m: Maker, x: str) -> str | None:
    """A transposed convolution, of groups or not."""
    if (found := _groups(m, x)) is None:
        return None
    groups, (channels, *space) = found
    rank = len(space)
    kernel, window = _kernel(m, rank), _window(m, rank, 1)
    pads = window["pads"]
    spatial = tuple(
        (extent - 1) * s + d * (k - 1) + 1 - low - high + m.integer(0, s - 1)
        for extent, k, s, d, low, high in zip(
            space, kernel, window["strides"], window["dilations"], pads[:rank], pads[rank:], strict=True
        )
    )
    if min(spatial) < 1:
        return None
    if groups:
        window["grouped"] = True
    w = m.weight(*groups, channels, m.integer(1, 3), *kernel)
    return m.build("ConvTranspose", x, w, spatial=spatial, **window)


def pool_max(m: Maker, x: str) -> str | None:
    """A max pool."""
    space = m.shape(x)[2:]
    if not 1 <= len(space) <= 3:
        return None
    kernel, window = _kernel(m, len(space)), _window(m, len(space), 1)
    window["pads"] = tuple(
        0 if k == 1 or e < 3 else p for k, e, p in zip(kernel * 2, space * 2, window["pads"], strict=True)
    )
    if not _room(space, kernel, window):
        return None
    return m.build("MaxPool", x, kernel_shape=kernel, **window)


def resample(m: Maker, x: str) -> str:
    """Another size of one axis."""
    mode = m.one("nearest", "linear", "cubic")
    options: dict[str, Any] = {"antialias": m.flip()} if mode != "nearest" else {}
    if mode == "cubic":
        options["exclude_outside"] = m.flip()
    options["coordinates"] = m.one("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
    options |= {"axis": m.axis(x), "size": m.integer(1, 12), "mode": mode, "scale": None}
    return m.build("Resample", x, nearest_mode="round_prefer_floor", transposed=False, **options)


def pool_average(m: Maker, x: str) -> str | None:
    """Sums or averages of windows along one axis."""
    axis, kernel, stride = m.axis(x), m.integer(1, 3), m.integer(1, 3)
    before, after = m.integer(0, kernel - 1), m.integer(0, kernel - 1)
    size = (m.shape(x)[axis] + before + after - kernel) // stride + 1
    if size < 1:
        return None
    window = (kernel, stride, 1, before, after)
    attrs = {"mode": m.one("average", "sum"), "count_include_pad": m.flip()}
    return m.build("Resample", x, axis=axis, size=size, window=window, transposed=False, **attrs)


def gather(m: Maker, x: str) -> str:
    """Rows at places that data names, for each of the batch or not; the best along the last axis."""
    shape = m.shape(x)
    if not m.integer(0, 2):
        last, k = len(shape) - 1, m.integer(1, shape[-1])
        places = m.build("Top", m.apart(x), axis=last, k=k, largest=m.flip())
        return m.build("Gather", x, places, batch=last)
    batch = m.axis(x)
    rows = shape[batch]
    many = tuple(m.integer(1, 4) for _ in range(m.integer(1, 2)))
    ids = m.random.integers(-rows, rows, size=(*shape[:batch], *many))
    return m.build("Gather", x, m.given(ids), batch=batch)


def sample(m: Maker, x: str) -> str:
    """Elements of the last axis at places that are computed, as GridSample weighs them: by the way there."""
    b, last = m.build, len(m.shape(x)) - 1
    far = b("Mul", b("Sigmoid", m.apart(x)), b.like(0.9 * m.shape(x)[-1], x))
    at = b("Add", far, b.like(0.05, x))  # never at an element, also where Sigmoid is 0 or 1
    low = b("Floor", at)
    rows = b("Gather", x, b("Cast", low, to="int64"), batch=last)
    return b("Mul", rows, b("Sub", at, low))


def scatter(m: Maker, x: str) -> str:
    """Rows put where data says: added up, or the last of each place."""
    shape, batch, rows = m.shape(x), m.axis(x), m.integer(1, 5)
    if m.flip():
        ids = m.random.integers(rows, size=shape[: m.integer(batch + 1, len(shape))])
        return m.build("GatherGrad", m.given(ids), x, rows=rows, batch=batch)
    ids = m.random.integers(rows, size=shape[: batch + 1])
    last = m.build("LastAt", m.given(ids), rows=rows, batch=batch)
    return m.build("Gather", x, last, batch=batch)


def recurrent(m: Maker, x: str) -> str | None:
    """An RNN, a GRU or an LSTM along the first axis."""
    shape = m.shape(x)
    if len(shape) < 2:
        return None
    kind = m.one(*KINDS)
    known, late, hidden = KINDS[kind], kind == "GRU" and m.flip(), m.integer(1, 3)
    steps, samples, features = shape[0], shape[1], prod(shape[2:])
    sizes = {"t": steps, "n": samples, "h": hidden, "g": known.gates * hidden, "1": 1}
    flat = m.build("Reshape", x, shape=(steps, samples, features))
    gates = m.build("Einsum", flat, m.weight(features, sizes["g"]), equation="tnf,fg->tng")
    others = [m.weight(*(sizes[axis] for axis in AXES[name])) for name in known.operands(late)[1:-1]]
    if m.flip():
        others.append(m.given(m.random.uniform(size=(steps, samples, 1)) < 0.7))
    attrs: dict[str, Any] = {"reverse": m.flip(), "activations": known.activations}
    if kind == "GRU":
        attrs["linear_before_reset"] = late
    made = dict(zip(known.results(), m.build.node(known.op, (gates, *others), attrs), strict=True))
    m.pool.append(made["last h"])
    return made["h"]


def attention(m: Maker, x: str) -> str | None:
    """Attention of queries to weights or to themselves, with a mask or not."""
    shape = m.shape(x)
    if len(shape) < 2:
        return None
    b, queries, h, size = shape[0], prod(shape[1:-1]), shape[-1], m.integer(1, 3)
    q = m.build("Reshape", m.build("Tanh", x), shape=(b, 1, 1, queries, h))
    if m.flip():
        keys, k = queries, m.build("Reshape", x, shape=(b, 1, queries, h))
        v = m.build("Reshape", x, shape=(b, 1, queries, h))
    else:
        keys = m.integer(1, 5)
        k, v = m.weight(b, 1, keys, h), m.weight(b, 1, keys, size)
    kind, wide = m.one("none", "added", "seen"), (m.one(1, b), 1, 1, m.one(1, queries), keys)
    mask = [m.weight(*wide)] if kind == "added" else []
    if kind == "seen":
        mask.append(m.given(m.random.uniform(size=wide) < 0.7))
    attrs = {"scale": 0.5, "band": m.one((None, None), (None, 0), (-1, 1)), "unseen": -inf, "blind": 0.0}
    return m.build.node("Attend", (q, k, v, *mask), attrs)[0]


def ctc(m: Maker, x: str) -> str | None:
    """The CTC loss of each sample."""
    shape = m.shape(x)
    if len(shape) < 3 or (classes := prod(shape[2:])) < 2:
        return None
    samples, frames, most = shape[0], shape[1], m.integer(1, 3)
    scores = m.build("Reshape", x, shape=(samples, frames, classes))
    arrays = (
        m.random.integers(1, classes, size=(samples, most)),
        m.random.integers(0, most + 1, size=samples),
        m.random.integers(1, frames + 1, size=samples),
    )
    return m.build("Ctc", scores, *map(m.given, arrays), blank=0, zero_infinity=True)


LAYERS = (
    *(conv, conv, transposed, transposed, pool_max, pool_max),
    *(resample, pool_average, gather, sample, scatter, recurrent, attention, ctc),
)
"""Steps that need some axes."""
