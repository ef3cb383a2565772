"""The torch engine whose programs are all run by several threads together."""

from __future__ import annotations

from dataclasses import replace

from oocdl.engines.engine import Compiled
from oocdl.engines.torch.torch_engine import TorchEngine
from oocdl.graph.ir.program import Program


class Together(TorchEngine):
    """Runs each program on so many threads, whatever it was made for; nothing is too small for a loop."""

    def __init__(self, threads: int) -> None:
        super().__init__(small_elements=2)
        self.threads = threads

    def compile(self, program: Program) -> Compiled:
        key = f"{program.key} on {self.threads} threads"
        return super().compile(replace(program, threads=self.threads, key=key))
