"""Plans of networks on any number of threads and workers, whatever this machine is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
from tests.kit.models import GPT, ResNet, UNet3d, export


def drafted(model: Path, data: Path, **options: object) -> Draft:
    """A training pass that can be cut in many ways."""
    settings = make_settings(engine="torch", memory="64GiB", **options)
    opened = inspect_onnx(model)
    binding = bind(opened, open_dataset(str(data), True), settings)
    how = {"settings": settings, "batch": settings.batch_size, "kind": PassKind.WHOLE}
    return draft_pass(Request(model=opened, binding=binding, **how))


@lru_cache(16)
def cut_for(draft: Draft, threads: int, workers: int, **parallel: object) -> CompiledPass:
    """The pass, cut for processes with room for units of a GiB; ``parallel``: the cuts that are asked for."""
    machine = Machine("torch", threads, 256 << 20, 32 << 30, workers=workers)
    settings = replace(draft.request.settings, parallel=parallel or "auto")
    return draft.cut(machine.limits(settings, 1 << 30))


def exchanged(compiled: CompiledPass, workers: int, threads: int = 1) -> Exchange:
    """The pass, placed on workers, and what travels between them."""
    placed = place(compiled.graph, workers, threads)
    return exchange(placed, homes_of([placed]), workers)


@cache
def unet_draft(size: int, samples: int = 1) -> Draft:
    """A U-Net on volumes of which there are no bytes; its files are gone."""
    with TemporaryDirectory() as folder:
        data, shape = Path(folder, "data.zarr"), (samples, size, size, size)
        group = zarr.open_group(data, mode="w")
        for name, dtype in (("image", "float32"), ("labels", "uint8")):
            group.create_array(name, shape=shape, dtype=dtype, chunks=(1, *shape[1:]))
        model = write_unet3d(Path(folder, "unet.onnx"))
        return drafted(model, data, loss="dice_ce", batch_size=samples)


@cache
def mlp_draft(widths: tuple[int, ...], samples: int) -> Draft:
    """Linear layers without biases, with Relus between, trained by Adam; its files are gone."""
    nodes, x = [], "x"
    weights = {}
    for number, (inside, outside) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
        weights[f"w{number}"] = np.zeros((inside, outside), np.float32)
        nodes.append(helper.make_node("MatMul", [x, f"w{number}"], [f"a{number}"], f"linear{number}"))
        nodes.append(helper.make_node("Relu", [f"a{number}"], [f"h{number}"], f"relu{number}"))
        x = f"h{number}"
    nodes[-1] = helper.make_node("Identity", [f"a{len(widths) - 2}"], ["y"], "last")
    with TemporaryDirectory() as folder:
        data, ends = Path(folder, "data.zarr"), (["batch", widths[0]], {"y": ["batch", widths[-1]]})
        model = nets.save(Path(folder, "mlp.onnx"), nodes, weights, *ends)
        group = zarr.open_group(data, mode="w")
        group.create_array("x", shape=(samples, widths[0]), dtype="float32", chunks=(samples, widths[0]))
        group.create_array("y", shape=(samples,), dtype="int64", chunks=(samples,))
        return drafted(model, data, loss="cross_entropy", batch_size=samples, optimizer="adam")


@cache
def plan_of(network: str) -> oocdl.Plan:
    """The plan of a network that is cut, for two threads with much memory."""
    random = np.random.default_rng(0)
    x = random.normal(size=(1, 1, 16, 16, 16)).astype("float32")
    made: Any = UNet3d(base=4, depth=2), x, (x[:, 0] > 0).astype("uint8"), {"space": (4,)}
    if network == "gpt":
        ids = random.integers(0, 64, size=(4, 32))
        made = GPT(64, 32, 32, 4, 1), ids, ids.astype("uint8"), {"batch": 2, "channels": 4}
    if network == "resnet":
        x = random.normal(size=(4, 3, 13, 11)).astype("float32")
        made = ResNet(), x, random.integers(10, size=4), {"batch": 4}
    net, x, labels, cuts = made
    options = {"memory": "6GiB", "engine": "torch", "threads": 2, "loss": "cross_entropy", "parallel": cuts}
    with TemporaryDirectory() as folder:
        model = export(net, (torch.as_tensor(x),), Path(folder, "net.onnx"), dynamic=(0,))
        data = nets.write_data(Path(folder, "data.zarr"), {"x": x, "y": labels})
        return oocdl.plan(model, data, batch_size=len(x), **options)
