"""Plans of networks on any number of threads and workers, whatever this machine is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import zarr
from onnx import helper

import oocdl
from oocdl.config import make_settings
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.planning.binding import bind
from oocdl.planning.compiler import CompiledPass, Draft, draft_pass
from oocdl.planning.hosts.exchange import Exchange, exchange, homes_of
from oocdl.planning.hosts.placement import place
from oocdl.planning.machine import Machine
from oocdl.planning.recipe import PassKind, Request
from oocdl.presets.unets import write_unet3d
from oocdl.storage.dataset.dataset import open_dataset
from tests.kit import nets
from tests.kit.models import export


def drafted(model: Path, data: Path, **options: object) -> Draft:
    """A training pass that can be cut in many ways."""
    settings = make_settings(engine="torch", memory="64GiB", **options)
    opened = inspect_onnx(model)
    binding = bind(opened, open_dataset(str(data), True), settings)
    return draft_pass(
        Request(
            model=opened, binding=binding, settings=settings, batch=settings.batch_size, kind=PassKind.WHOLE
        )
    )


def cut_for(draft: Draft, threads: int, workers: int, **parallel: object) -> CompiledPass:
    """The pass, cut for processes with room for units of a GiB; ``parallel``: the cuts that are asked for."""
    machine = Machine("torch", threads, 256 << 20, 32 << 30, workers=workers)
    settings = replace(draft.request.settings, parallel=parallel or "auto")
    return draft.cut(machine.limits(settings, 1 << 30))


def exchanged(compiled: CompiledPass, workers: int, threads: int = 1) -> Exchange:
    """The pass, placed on workers, and what travels between them."""
    placed = place(compiled.graph, workers, threads)
    return exchange(placed, homes_of([placed]), workers)


def unet_draft(folder: Path, size: int, samples: int = 1) -> Draft:
    """A U-Net on volumes of which there are no bytes."""
    group = zarr.open_group(str(folder / "data.zarr"), mode="w")
    for name, dtype in (("image", "float32"), ("labels", "uint8")):
        shape = (samples, size, size, size)
        group.create_array(name, shape=shape, dtype=dtype, chunks=(1, *shape[1:]))
    model = write_unet3d(folder / "unet.onnx")
    return drafted(model, folder / "data.zarr", loss="dice_ce", batch_size=samples)


def mlp_draft(folder: Path, widths: Sequence[int], samples: int) -> Draft:
    """Linear layers without biases, with Relus between, trained by Adam."""
    nodes, x = [], "x"
    weights = {}
    for number, (inside, outside) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
        weights[f"w{number}"] = np.zeros((inside, outside), np.float32)
        nodes.append(helper.make_node("MatMul", [x, f"w{number}"], [f"a{number}"], f"linear{number}"))
        nodes.append(helper.make_node("Relu", [f"a{number}"], [f"h{number}"], f"relu{number}"))
        x = f"h{number}"
    nodes[-1] = helper.make_node("Identity", [f"a{len(widths) - 2}"], ["y"], "last")
    model = nets.save(folder / "mlp.onnx", nodes, weights, ["batch", widths[0]], {"y": ["batch", widths[-1]]})
    group = zarr.open_group(str(folder / "data.zarr"), mode="w")
    group.create_array("x", shape=(samples, widths[0]), dtype="float32", chunks=(samples, widths[0]))
    group.create_array("y", shape=(samples,), dtype="int64", chunks=(samples,))
    return drafted(model, folder / "data.zarr", loss="cross_entropy", batch_size=samples, optimizer="adam")


def plan_of(
    net: torch.nn.Module, x: np.ndarray, labels: np.ndarray, parallel: Mapping[str, object], folder: Path
) -> oocdl.Plan:
    """The plan of a network for two threads with much memory, all samples of ``x`` a batch."""
    model = export(net, (torch.as_tensor(x),), folder / "net.onnx", dynamic=(0,))
    group = zarr.open_group(folder / "data.zarr", mode="w")
    group.create_array("x", data=x)
    group.create_array("y", data=labels)
    options = {"memory": "6GiB", "engine": "torch", "threads": 2, "loss": "cross_entropy"}
    return oocdl.plan(model, folder / "data.zarr", batch_size=len(x), parallel=parallel, **options)
