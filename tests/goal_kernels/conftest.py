"""Ahead-of-time compilation of what the ops launch, on a machine without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

# Inductor keeps compiled graphs by graph and torch version: what an op's fake kernel said in an earlier version of this
# package would be taken for what it says now.
os.environ.update(TORCHINDUCTOR_FX_GRAPH_CACHE="0", TORCHINDUCTOR_AUTOGRAD_CACHE="0")

ALL_BUILDS = os.environ.get("GOAL_ALL_BUILDS") == "1"
every_tile = pytest.mark.skipif(not ALL_BUILDS, reason="takes minutes: GOAL_ALL_BUILDS=1 runs it")

# Shared memory one program can have, by compute capability.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_MEMORY = 512  # columns of the accumulators' memory of sm_100


@dataclass(frozen=True)
class CompiledKernel:
    """What the compiler made of one launch."""

    name: str
    capability: int
    registers: int
    stack: int  # bytes of local memory a thread: spilled registers live there
    shared: int
    tensor: int  # columns of tensor memory
    ptx: str
    ttgir: str

    def check(self, *, wgmma: bool = False) -> None:
        """No spills, memory on the chip suffices, and on sm_90 the matrix unit is used if the kernel multiplies."""
        assert self.stack == 0, f"{self.name} spills {self.stack} bytes a thread on sm_{self.capability}"
        self.check_memory()
        if wgmma and self.capability == 90:
            assert "wgmma.mma_async" in self.ptx, f"{self.name} does not use wgmma"

    def check_memory(self) -> None:
        """What it needs on the chip is there; without it a launch fails."""
        assert self.shared <= SHARED_MEMORY[self.capability], f"{self.name} needs {self.shared} bytes of shared memory"
        assert self.tensor <= TENSOR_MEMORY, f"{self.name} needs {self.tensor} columns of tensor memory"


def resource_usage(cubin: bytes, folder: Path) -> tuple[int, int]:
    """Registers and stack bytes a thread, as the cuobjdump that Triton ships reports them."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return int(registers), int(stack)


@pytest.fixture
def compile_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[CompiledKernel]]:
    """A function that runs a callable on CPU tensors and compiles, instead of launching, each kernel it launches, for
    the compute capabilities asked for. Whatever configuration the host code picks is what gets compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from goal_kernels import _launch

    launch = JITFunction.run

    class Target:
        """Stands where the CUDA driver stands. Kernels are cached per device: one device a capability."""

        def __init__(self, capability: int) -> None:
            self.capability = capability

        def get_current_device(self) -> int:
            return self.capability

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", self.capability, 32)

    def compile_them(function: Callable[[], object], capabilities: tuple[int, ...] = (90,)) -> list[CompiledKernel]:
        kernels = []
        for capability in capabilities:
            seen = set()

            def record(self, *arguments, capability=capability, seen=seen, **options):
                kernel = launch(self, *arguments, **options | {"warmup": True})
                if kernel.hash not in seen:
                    seen.add(kernel.hash)
                    registers, stack = resource_usage(kernel.asm["cubin"], tmp_path)
                    memory = kernel.metadata.shared, kernel.metadata.tmem_size or 0
                    code = kernel.asm["ptx"], kernel.asm["ttgir"]
                    kernels.append(CompiledKernel(self.__name__, capability, registers, stack, *memory, *code))

            with monkeypatch.context() as patch:
                patch.setattr(driver, "_active", Target(capability))  # set_active cannot be undone without a GPU
                patch.setattr(_launch, "capability", lambda device, value=capability: value)
                patch.setattr(_launch, "INTERPRETED_MULTIPROCESSORS", 132)  # as many as an H100 has
                patch.setattr(JITFunction, "run", record)
                _launch.multiprocessors.cache_clear()
                function()
            _launch.multiprocessors.cache_clear()
        assert kernels, "nothing was launched"
        return kernels

    assert not triton.knobs.runtime.interpret
    return compile_them
