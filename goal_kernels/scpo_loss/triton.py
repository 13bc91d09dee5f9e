"""SCPO loss and its gradient in one pass over the logits. See eager.py for the semantics.

A program holds whole sequences: the log-probabilities of all their tokens give the ratio, and the ratio gives the
gradient, while the logits are still in registers. Nothing of shape (G, T, V) is written but that gradient, in the dtype
of the logits. Sums over sequences go through one partial per program and a second launch that adds the partials in a
fixed order, so that every run gives the same bits.
"""

# Triton's launch syntax, kernel[grid](...), takes plain values for constexpr parameters, and options besides:
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import sys

import torch
import triton
from torch import Tensor

from goal_kernels._launch import most_registers, multiprocessors, on_device_of, within_32_bits
from goal_kernels.scpo_loss._kernels import PARTIALS, scale_kernel, scpo_loss_kernel, scpo_summary_kernel
from goal_kernels.scpo_loss.eager import ScpoLoss

# A sequence's T x V logits stay in registers: beyond this many (both rounded up to powers of two) eager runs.
MAX_SEQUENCE = 4096
# A sequence of up to this many elements is one warp's: 16 of each policy's a thread, and no barrier anywhere. Rows that
# do not start on multiples of ALIGNMENT elements are loaded one element at a time, which takes registers.
WARP_TILE, UNALIGNED_WARP_TILE = 512, 256
ALIGNMENT = 16
PROGRAMS_PER_MULTIPROCESSOR = 16
SUMMARY_PARTS = 1024  # partials the summary reads at once
SCALE_TILE = 8192  # elements a program of the scaling kernel takes in one step


LIMITS = f"16- and 32-bit floats, up to {MAX_SEQUENCE} logits a sequence, both dimensions rounded up to powers of two"


def supports(logits: Tensor) -> bool:
    """Whether the kernel can run, see `LIMITS`."""
    _, steps, vocabulary = logits.shape
    return logits.dtype != torch.float64 and sequence_tile(steps, vocabulary) <= MAX_SEQUENCE


def sequence_tile(steps: int, vocabulary: int) -> int:
    """Registers one sequence takes, in elements."""
    return int(triton.next_power_of_2(max(steps, 1)) * triton.next_power_of_2(vocabulary))


def program_options(steps: int, vocabulary: int, *, aligned: bool) -> dict[str, int | None]:
    """Sequences, warps and most registers of a program: pinned, by the size of a sequence's tile.

    Left alone ptxas spills some unaligned loads of several warps.
    """
    elements = sequence_tile(steps, vocabulary)
    if elements > (WARP_TILE if aligned else UNALIGNED_WARP_TILE):
        warps = min(16, max(4, elements // 256))
        return {"S": 1, "num_warps": warps, "maxnreg": None if aligned else most_registers(warps)}
    tile = WARP_TILE if aligned else UNALIGNED_WARP_TILE // 2
    return {"S": max(1, tile // elements), "num_warps": 1, "maxnreg": None}


@torch.library.custom_op("goal_kernels::scpo_loss", mutates_args=())
def scpo_loss_op(
    logits: Tensor,
    reference_logits: Tensor,
    tokens: Tensor,
    old_log_probs: Tensor,
    lengths: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    kl_weight: float,
    exact: bool,
    per_token: bool,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, the seven statistics after it in `ScpoLoss`, and the gradient times `1 / gradient_factor`."""
    sequences, steps, vocabulary = logits.shape
    loss, statistics, gradient = _outputs(logits, with_gradient)
    with on_device_of(logits):
        logits, reference_logits = within_32_bits(logits, 2), within_32_bits(reference_logits, 2)
        strides = (*logits.stride(), *reference_logits.stride())
        aligned = vocabulary % ALIGNMENT == 0 and strides[2] == strides[5] == 1
        options = program_options(steps, vocabulary, aligned=aligned)
        most = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(logits.device)
        programs = max(1, min(triton.cdiv(sequences, options["S"]), most))
        partials = torch.empty(programs, int(PARTIALS.value), dtype=torch.float32, device=logits.device)
        scpo_loss_kernel[(programs,)](
            logits,
            reference_logits,
            tokens.contiguous(),
            old_log_probs.contiguous(),
            lengths.contiguous(),
            advantages.contiguous(),
            gradient,
            partials,
            sequences,
            programs,
            steps,
            vocabulary,
            *strides,
            clip_low,
            clip_high,
            kl_weight,
            1.0 / (max(sequences, 1) * gradient_factor(logits)),
            EXACT=exact,
            PER_TOKEN=per_token,
            GRADIENT=with_gradient,
            T=triton.next_power_of_2(max(steps, 1)),
            V=triton.next_power_of_2(vocabulary),
            **options,
        )
        block = min(SUMMARY_PARTS, max(16, triton.next_power_of_2(programs)))
        scpo_summary_kernel[(1,)](
            partials,
            loss,
            statistics,
            programs,
            sequences,
            PER_TOKEN=per_token,
            BLOCK=block,
            num_warps=max(1, block // 64),
        )
    return loss, statistics, gradient


def _outputs(logits: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    return (
        logits.new_empty((), dtype=torch.float32),
        logits.new_empty(len(ScpoLoss._fields) - 1, dtype=torch.float32),
        logits.new_empty(logits.shape if with_gradient else 0),
    )


def gradient_factor(logits: Tensor) -> float:
    """What is left out of the gradient in the forward pass and multiplied in afterwards.

    The mean over G sequences makes each entry of order 1/G, below the smallest fp16 number for large G; a loss scale
    arrives only with the upstream gradient, too late to save what was rounded to zero. bf16 has the range of fp32.
    """
    return 1.0 / max(logits.shape[0], 1) if logits.dtype == torch.float16 else 1.0


@scpo_loss_op.register_fake
def _(logits: Tensor, *arguments: object) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(logits, bool(arguments[-1]))


@torch.library.custom_op("goal_kernels::scale_", mutates_args={"gradient"})
def scale_op(gradient: Tensor, upstream: Tensor, factor: float) -> None:
    """Multiply `gradient` in place by `upstream * factor`."""
    elements = gradient.numel()
    if elements == 0:
        return
    with on_device_of(gradient):
        programs = min(triton.cdiv(elements, SCALE_TILE), 4 * multiprocessors(gradient.device))
        scale_kernel[(programs,)](gradient, upstream, factor, elements, BLOCK=SCALE_TILE, num_warps=8)


@scale_op.register_fake
def _(gradient: Tensor, upstream: Tensor, factor: float) -> None:
    return None


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, statistics, gradient = output
    ctx.mark_non_differentiable(statistics, gradient)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]
    # Not save_for_backward: the first backward pass scales it in place and gives it away.
    ctx.gradient = gradient


def _backward(ctx, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (5 + len(ctx.options))
    if upstream is None or not ctx.options[-1]:
        return None, *nothing
    inputs = ctx.saved_tensors
    factor = gradient_factor(inputs[0])
    if torch.compiler.is_compiling() or type(ctx.gradient) not in (Tensor, type(None)):
        # Being traced: a pure function of the saved gradient, which the compiler fuses with what comes next.
        return (ctx.gradient.float() * (upstream * factor)).to(inputs[0].dtype), *nothing
    gradient, ctx.gradient = ctx.gradient, None
    if gradient is None:  # a second backward pass through a retained graph
        gradient = scpo_loss_op(*inputs, *ctx.options)[2]
    elif sys.getrefcount(gradient) > 2:  # whoever called the op itself still holds it
        gradient = gradient.clone()
    scale_op(gradient, upstream, factor)
    return gradient, *nothing


scpo_loss_op.register_autograd(_backward, setup_context=_setup_context)


def scpo_loss(
    logits: Tensor,
    reference_logits: Tensor,
    tokens: Tensor,
    old_log_probs: Tensor,
    lengths: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kl_weight: float,
    kl: str,
    ratio: str,
) -> ScpoLoss:
    """Triton `goal_kernels.scpo_loss`."""
    loss, statistics, _ = scpo_loss_op(
        logits,
        reference_logits.detach(),
        tokens,
        old_log_probs.detach(),
        lengths,
        advantages.detach(),
        float(clip_low),
        float(clip_high),
        float(kl_weight),
        kl == "exact",
        ratio == "token",
        logits.requires_grad and torch.is_grad_enabled(),
    )
    return ScpoLoss(loss, *statistics.unbind())
