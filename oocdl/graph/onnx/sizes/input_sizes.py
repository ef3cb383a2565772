"""Sizes of a model's inputs: those that are given, those that the file fixes, and open ones by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Shape
from oocdl.graph.onnx.bounds import check_shape
from oocdl.graph.onnx.model_file import Port, shown


def sizes_of(
    inputs: Sequence[Port], shapes: Mapping[str, Shape]
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return the shapes to bind the inputs to, and the same with the extents that the file fixes.

    ``shapes`` are those that are given, by input. Raises ModelError where they do not fit the file.
    """
    unknown = sorted(set(shapes) - {port.name for port in inputs})
    if unknown:
        known = ", ".join(shown(port.name) for port in inputs)
        raise ModelError(f"the model has no input {shown(unknown[0])}; its inputs are {known}")
    bound, traced, sizes = {}, {}, dict[str, int]()
    for port in inputs:
        shape = tuple(shapes.get(port.name, port.dims))
        if len(shape) != len(port.dims):
            raise ModelError(
                f"input {shown(port.name)} has {len(port.dims)} axes {list(port.dims)}, "
                f"but is given {list(shape)}"
            )
        extents = []
        for dim, extent in zip(port.dims, shape, strict=True):
            if not isinstance(extent, int | np.integer):
                extent = sizes.get(str(dim), 0)
                if not extent:
                    raise ModelError(
                        f"dim '{dim}' of input {shown(port.name)} has no size; pass dims={{'{dim}': ...}}"
                    )
            if extent < 1:
                raise ModelError(
                    f"input {shown(port.name)} is given the extent {extent}; it has to be positive"
                )
            if isinstance(dim, str) and sizes.setdefault(dim, int(extent)) != extent:
                raise ModelError(f"dim '{dim}' is {sizes[dim]}, but {extent} in input {shown(port.name)}")
            extents.append(int(extent))
        check_shape(extents, f"input {shown(port.name)}")
        bound[port.name] = tuple(extents)
        traced[port.name] = tuple(
            dim if isinstance(dim, int) else extent for dim, extent in zip(port.dims, extents, strict=True)
        )
    return bound, traced


def other_sizes(inputs: Sequence[Port], shapes: Mapping[str, Shape]) -> str:
    """Say which inputs are given other sizes than the file fixes, but for the batch; '' if none is.

    What an exporter leaves no trace of cannot be seen in a file: a window that an adaptive pooling had, a
    branch that was taken for a size, an amount of padding.
    """
    for port in inputs:
        pairs = list(zip(port.dims, shapes.get(port.name, port.dims), strict=True))
        if any(isinstance(dim, int) and dim != extent for dim, extent in pairs[1:]):
            sizes, given = [dim for dim, _ in pairs], [int(extent) for _, extent in pairs]
            return (
                f"the file fixes input {shown(port.name)} to {sizes}, and it is given {given}: windows, "
                "branches and paddings that the exporter chose by its sizes stay those of the file"
            )
    return ""


EXPORT_OPEN = "export it with these axes open (dynamic axes, dynamic shapes)"
"""The cure of that."""
