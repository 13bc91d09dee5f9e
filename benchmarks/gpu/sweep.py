"""Other launch configurations than the pinned ones, timed beside them. Nothing is changed: what wins is pinned by hand.

python benchmarks/gpu/sweep.py [--only loss] [--out runs/gpu_sweep]

A variant replaces constants or functions of the package while its work is checked against fp64 and captured in a CUDA
graph; the graphs then take turns, so that all variants of one piece of work are timed alike. One line each.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import advantage
import conv
import experts
import loss
import torch
from measuring import PARITY, Functions, Row, describe_machine, graphed, interleaved_medians

PINNED = "pinned"


@dataclass(frozen=True)
class Variant:
    """What stands in for the package's own while the work is built: values by "module:attribute"."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for place, value in self.values.items():
                module, attribute = place.split(":")
                owner = importlib.import_module(f"goal_kernels.{module}")
                stack.enter_context(mock.patch.object(owner, attribute, value))
            yield


@dataclass(frozen=True)
class Sweep:
    """One piece of work and its variants, the pinned configuration first."""

    row: Row
    variants: tuple[Variant, ...]


def changed(**options: Any) -> Callable[..., dict[str, Any]]:
    """A function that gives these launch options, whatever it is asked."""
    return lambda *_, **__: dict(options)


def other_stages(stages: int) -> dict[int, Any]:
    from goal_kernels.dilated_conv import configurations

    return {
        width: replace(tile, stages=stages) if width == 128 else tile for width, tile in configurations.BLOCK_16.items()
    }


def sweeps() -> list[Sweep]:
    """Every sweep, by the rows of the tables."""
    pinned = Variant(PINNED)
    options, tiles = "scpo_loss.triton:program_options", "routed_experts._launches:mixture_tiles"
    split, router = "routed_experts._launches:hidden_split", "routed_experts._launches:ROUTER_TOKENS"
    norm, stack = "dilated_conv.configurations:NORM_PROGRAMS", "dilated_conv.configurations:BLOCK_16"
    of_loss = (
        pinned,
        Variant("2 warps", {options: changed(S=1, num_warps=2, maxnreg=None)}),
        Variant("4 warps, 2 sequences", {options: changed(S=2, num_warps=4, maxnreg=None)}),
        Variant("32 programs", {"scpo_loss.triton:PROGRAMS_PER_MULTIPROCESSOR": 32}),
        Variant("256 partials a step", {"scpo_loss.triton:SUMMARY_PARTS": 256}),
    )
    of_advantage = (pinned, *(Variant(f"tile {tile}", {"group_advantage.triton:TILE": tile}) for tile in (512, 2048)))
    large = (pinned, *(Variant(f"router {tokens} tokens", {router: tokens}) for tokens in (128, 256)))
    whole = {"DP": 128, "BH": 64, "num_warps": 8, "num_stages": 2}
    small = (
        pinned,
        Variant("hidden whole", {split: lambda shape: 1}),
        Variant("halves, 64 channels a step", {tiles: changed(**whole)}),
        Variant("halves, 3 stages", {tiles: changed(**whole | {"BH": 32, "num_stages": 3, "maxnreg": 128})}),
    )
    norms = tuple(Variant(f"{programs} programs", {norm: programs}) for programs in (264, 528))
    rows = "dilated_conv.configurations:norm_rows"
    shorter = Variant("half the rows", {rows: lambda channels, *, interpreted: max(1, 1024 // channels)})
    stages = tuple(Variant(f"{count} stages", {stack: other_stages(count)}) for count in (2, 4))
    convolutions = [(pinned, *stages), (pinned, *stages, *norms, shorter), (pinned,), (pinned, *norms, shorter)]
    every = [
        *((row, of_loss) for row in loss.rows()),
        *((row, of_advantage) for row in advantage.rows()),
        *zip(experts.rows(), (large, large, small, small), strict=True),
        *zip(conv.rows(), convolutions, strict=True),
    ]
    return [Sweep(row, variants) for row, variants in every if len(variants) > 1]


def run(sweep: Sweep) -> dict[str, dict[str, Any]]:
    """Errors and median in ms by variant; a variant that fails or is not exact enough has no time."""
    results: dict[str, dict[str, Any]] = {}
    ready: Functions = {}
    for variant in sweep.variants:
        result = results[variant.name] = {}
        try:
            with variant.applied():
                result["errors"] = errors = sweep.row.errors()
                if not all(error <= PARITY[sweep.row.dtype] for error in errors.values()):
                    raise ValueError(f"parity: {errors}")
                ours, _ = sweep.row.prepare()
                ready[variant.name] = graphed(ours["ours"])
        except Exception as error:  # one variant must not hide the others
            result["failed"] = f"{type(error).__name__}: {error}".replace("\n", " ")[:160]
    for name, time in interleaved_medians(ready).items():
        results[name]["time"] = time
    return results


def lines(sweep: Sweep, results: dict[str, dict[str, Any]]) -> list[str]:
    """One printed line a variant: its time and its ratio to the pinned configuration's."""
    base = results[PINNED].get("time")
    printed = []
    for name, result in results.items():
        if "time" in result:
            ratio = f"{result['time'] / base:6.3f} of pinned" if base else ""
            printed.append(f"{sweep.row.name:46} {name:28} {result['time']:8.4f} ms {ratio}")
        else:
            printed.append(f"{sweep.row.name:46} {name:28} FAILED {result['failed']}")
    return printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_sweep"), help="folder for the JSON")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    print(" | ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    content: dict[str, Any] = {"machine": machine, "rows": {}}
    for sweep in sweeps():
        if options.only in sweep.row.name:
            content["rows"][sweep.row.name] = results = run(sweep)
            print("\n".join(lines(sweep, results)), flush=True)
            (options.out / "sweep.json").write_text(json.dumps(content, indent=2))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
