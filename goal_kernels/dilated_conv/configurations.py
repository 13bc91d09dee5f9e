"""The pinned launch configurations: tile shapes, warps and pipeline stages by width and number format.

Chosen by prototypes on an H100 and by what builds without spilling registers; correct everywhere. Nothing is tuned at
run time, so no length, batch size or device state changes which kernel runs, and results keep their bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

# The widest row, padded to a power of two, that a tile of accumulators holds beside masks and the loop over layers, by
# bytes an element. One layer at a time and without masks twice that fits; wider rows are normalised in a second pass.
FUSED_CHANNELS = {2: 256, 4: 128}
# Programs that share the sums over rows: as many as an H100 holds at once with the LayerNorm backward's 145 registers,
# three a multiprocessor. A constant, not the device's multiprocessor count: the split decides the bits.
NORM_PROGRAMS = 396
# About two programs of the weight gradient for each multiprocessor of an H100.
WEIGHT_PROGRAMS = 264
# A guarded launch usually has nothing to do: few programs, so that it ends at once.
GUARD_PROGRAMS = 264
# Sequences up to this length run all layers in one launch: a program then holds whole sequences in a few tiles.
STACK_LENGTH = 128
# Above this many bytes the gradients before LayerNorm are not kept for all layers at once.
KEPT_GRADIENT_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Tile:
    """rows x columns accumulators, `depth` summed at a time; `registers` caps a thread so that two programs fit."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    registers: int | None = None


INTERPRETED = Tile(rows=32, columns=16, depth=16, warps=1, stages=1)

# by padded width; 16-bit formats
BLOCK_16 = {
    64: Tile(128, 64, 64, 8, 3, 128),
    128: Tile(128, 128, 64, 8, 3, 128),
    256: Tile(128, 256, 64, 8, 3),
    512: Tile(64, 512, 32, 8, 3),
}
# fp32 runs three tf32 products per product: more registers and twice the bytes
BLOCK_32 = {
    64: Tile(64, 64, 32, 4, 3),
    128: Tile(64, 128, 32, 8, 3),
    256: Tile(64, 256, 32, 8, 2),
}
# Guarded: beside the loop, and Hopper's matrix unit takes no fewer than 64 rows
GUARDED_16 = BLOCK_16 | {256: Tile(64, 256, 64, 8, 3), 512: Tile(64, 512, 32, 8, 2)}
GUARDED_32 = BLOCK_32 | {256: Tile(64, 256, 16, 8, 2)}
# Not on Hopper, guarded or not
OTHER_16 = BLOCK_16 | {256: Tile(64, 256, 64, 8, 3), 512: Tile(32, 512, 32, 8, 3)}
OTHER_32 = BLOCK_32 | {256: Tile(32, 256, 32, 8, 2)}
CONV_16 = {64: Tile(128, 64, 64, 8, 3, 128), 128: Tile(128, 128, 64, 8, 3, 128)}
CONV_32 = {64: Tile(64, 64, 32, 4, 3), 128: Tile(64, 128, 32, 8, 3)}
# Channels that do not fill those tiles need masks, which take registers
MASKED_16, OTHER_MASKED_16 = Tile(64, 128, 64, 8, 3), Tile(64, 128, 32, 8, 3)
MASKED_32 = Tile(64, 64, 32, 8, 3)
WEIGHT_16 = {64: Tile(64, 64, 64, 4, 3), 128: Tile(128, 128, 64, 8, 3, 128)}
WEIGHT_32 = {64: Tile(64, 64, 32, 4, 3), 128: Tile(64, 64, 32, 4, 3)}

# Descriptor kernels (Hopper, 16-bit formats): one tile spans these widths, and sequences are cut into tiles of 128
# positions as long as that adds at most an eighth.
WIDE_CHANNELS = (256,)
WIDE_WASTE = 1.125
WIDE = Tile(128, 256, 64, 8, 3)
WIDE_WEIGHT = Tile(128, 256, 64, 8, 4)
# One program of the wide weight gradient for each multiprocessor of an H100.
WIDE_WEIGHT_PROGRAMS = 132


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value` and at least 16, the least a matrix unit takes."""
    return max(16, 1 << (value - 1).bit_length())


def fuses(channels: int, dtype: torch.dtype) -> bool:
    """Whether one kernel takes a layer with its LayerNorm."""
    width, most = power_of_two(channels), FUSED_CHANNELS[dtype.itemsize]
    return width <= (2 * most if width == channels else most)


def fuses_layers(length: int, channels: int, dtype: torch.dtype) -> bool:
    """Whether one launch takes all layers."""
    return length <= STACK_LENGTH and power_of_two(channels) <= FUSED_CHANNELS[dtype.itemsize]


def block_tile(channels: int, dtype: torch.dtype, *, interpreted: bool, guarded: bool, hopper: bool) -> Tile:
    """Fused block: the tile spans the whole (padded) row.

    The loop around a guarded launch, and a matrix unit other than Hopper's, need registers beside the accumulator:
    smaller tiles, and less deep ones where there are masks.
    """
    width = power_of_two(channels)
    if interpreted:
        return Tile(32, width, 16, 1, 1)
    tables = (BLOCK_32, GUARDED_32, OTHER_32) if dtype == torch.float32 else (BLOCK_16, GUARDED_16, OTHER_16)
    tile = tables[2 if not hopper else 1 if guarded else 0][max(width, 64)]
    rows, depth = tile.rows, min(tile.depth, width)
    if channels < width and (guarded or not hopper):
        depth = max(16, depth // 2)
        rows = rows // 2 if width >= 256 and not hopper else rows
    return Tile(rows, width, depth, tile.warps, tile.stages, tile.registers)


def conv_tile(channels_in: int, channels_out: int, dtype: torch.dtype, *, interpreted: bool, hopper: bool) -> Tile:
    """Plain convolution, forward and towards the input: columns may take several tiles."""
    if interpreted:
        return INTERPRETED
    width = power_of_two(channels_out)
    tile = (CONV_32 if dtype == torch.float32 else CONV_16)[64 if width <= 64 else 128]
    depth = power_of_two(channels_in)
    if channels_in % min(tile.depth, depth) > 0 or channels_out % tile.columns > 0:
        tile = MASKED_32 if dtype == torch.float32 else MASKED_16 if hopper else OTHER_MASKED_16
    return replace(tile, columns=min(tile.columns, width), depth=min(tile.depth, depth))


def weight_tile(channels_in: int, channels_out: int, dtype: torch.dtype, *, interpreted: bool) -> Tile:
    """Weight gradient: rows and columns are input and output channels, depth is rows of the batch.

    Channels that do not fill large tiles get small ones, for the masks' registers.
    """
    if interpreted:
        return INTERPRETED
    table = WEIGHT_32 if dtype == torch.float32 else WEIGHT_16
    widths = power_of_two(channels_in), power_of_two(channels_out)
    tile = table[128 if channels_in % 128 == 0 and channels_out % 128 == 0 else 64]
    return Tile(
        min(tile.rows, widths[0]), min(tile.columns, widths[1]), tile.depth, tile.warps, tile.stages, tile.registers
    )


def norm_rows(channels: int, *, interpreted: bool) -> int:
    """Rows per tile of the LayerNorm backward: about 2048 elements for 128 threads."""
    return 8 if interpreted else max(1, 2048 // power_of_two(channels))


def wide_tile(*, interpreted: bool) -> Tile:
    """Descriptor kernel forward and towards the input."""
    return Tile(16, 32, 16, 1, 1) if interpreted else WIDE


def wide_weight_tile(*, interpreted: bool) -> Tile:
    """Descriptor kernel of the weight gradient: rows are input channels, depth positions."""
    return Tile(16, 32, 16, 1, 1) if interpreted else WIDE_WEIGHT
