"""The engines: one entry for each says what has to be known of a runtime before it is imported.

A further engine is one package and one entry here (``docs/how-to/adding-an-engine.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One engine, whose name is that of the runtime's package."""

    module: str
    """The module with ``make_engine()``."""
    install: str
    """The name of the runtime, and how to install it."""
    precisions: frozenset[str]
    """dtypes that the engine computes in."""
    channels_last: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Precision -> ranks of values: convolutions are faster where these have their channels last."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the runtime reads when it is first used; the user's own stay."""
    device_module: str = ""
    """The module with ``make_engine(device)`` of engines named "runtime:device"; "": there are none."""
    device_names: str = ""
    """Names of devices that can be asked for, as a regular expression."""
    device_examples: tuple[str, ...] = ()
    """Names of such engines, for the error message about an unknown one."""
    loading_bytes: Mapping[str, int] = field(default_factory=dict)
    """File of the runtime, where it is there -> least bytes that a process grows by as it loads that."""

    def least_loading_bytes(self, runtime: str) -> int:
        """Return the least bytes that a process grows by as it loads the runtime, which is not imported."""
        spec = find_spec(runtime)
        if spec is None or spec.origin is None:
            return 0
        root = Path(spec.origin).parent
        return sum(nbytes for file, nbytes in self.loading_bytes.items() if (root / file).exists())


ENGINES: Mapping[str, Entry] = {
    "torch": Entry(
        module="oocdl.engines.torch.torch_engine",
        install="PyTorch: pip install 'oocdl[torch]'",
        precisions=frozenset({"float32", "bfloat16", "float64"}),
        channels_last={"float32": (4, 5), "bfloat16": (4, 5)},
        # Large pages for large tensors, as NumPy has them: half of a copy's time is page faults.
        environment={"THP_MEM_ALLOC_ENABLE": "1", "GOMP_SPINCOUNT": "10000"},
        # PyTorch 2.13: 122 MiB, and 257 where it is built with CUDA.
        loading_bytes={"__init__.py": 110 << 20, "lib/libtorch_cuda.so": 120 << 20},
        device_module="oocdl.engines.torch.device",
        device_names=r"cpu|cuda(:(0|[1-9]\d?))?",
        device_examples=("torch:cuda", "torch:cuda:1 (and so on)"),
    ),
    "onnxruntime": Entry(
        module="oocdl.engines.ort.ort_engine",
        install="onnxruntime: pip install onnxruntime",
        precisions=frozenset({"float32"}),
        channels_last={"float32": (5,)},
        loading_bytes={"__init__.py": 16 << 20},
    ),
    "numpy": Entry(
        module="oocdl.engines.numpy.numpy_engine",
        install="NumPy: pip install numpy",
        precisions=frozenset({"float32", "float64"}),
    ),
}
"""Engine name -> entry, in order of preference."""


def widest_float(engine: str) -> str:
    """The widest dtype that an engine sums in.

    >>> widest_float("torch:cuda"), widest_float("onnxruntime")
    ('float64', 'float32')
    """
    return max(ENGINES[engine.partition(":")[0]].precisions & {"float32", "float64"})


def channels_last_ranks(engine: str, precision: str) -> tuple[int, ...]:
    """The ranks of values that an engine wants with their channels last; none for an engine on a device.

    >>> channels_last_ranks("torch", "float32"), channels_last_ranks("torch:cuda", "float32")
    ((4, 5), ())
    """
    return ENGINES[engine].channels_last.get(precision, ()) if engine in ENGINES else ()
