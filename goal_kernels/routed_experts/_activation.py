"""The experts' activations inside a kernel, with their slope for the backward pass.

`TANH` says how tanh is computed: "exact" (by exp, for fp32), "fast" (one instruction, error 5e-4, under the rounding of
fp16) or "half" (one instruction for two values, error 1e-3, under the rounding of bf16).
"""

# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

GELU_SCALE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
GELU_CUBIC = tl.constexpr(0.044715)
ROOT_HALF = tl.constexpr(0.7071067811865476)
NORMAL_DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)

TANH_FAST = tl.constexpr("tanh.approx.f32 $0, $1;")
TANH_HALF = tl.constexpr(
    """
    {
    .reg .b32 pair;
    .reg .b16 low, high;
    cvt.rn.f16x2.f32 pair, $3, $2;
    tanh.approx.f16x2 pair, pair;
    mov.b32 {low, high}, pair;
    cvt.f32.f16 $0, low;
    cvt.f32.f16 $1, high;
    }
    """
)


@triton.jit
def tanh(x, TANH: tl.constexpr):
    if TANH == "exact":
        return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    elif TANH == "fast":
        return tl.inline_asm_elementwise(TANH_FAST, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(TANH_HALF, "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, TANH: tl.constexpr):
    """Value of the activation at fp32 `x`; 0 at 0 for each of them."""
    if ACTIVATION == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(x * (GELU_SCALE + (GELU_SCALE * GELU_CUBIC) * x * x), TANH))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * ROOT_HALF))
    elif ACTIVATION == "relu":
        return tl.where(x < 0.0, 0.0, x)
    else:
        return x * (0.5 + 0.5 * tanh(0.5 * x, TANH))


@triton.jit
def activate_with_slope(x, ACTIVATION: tl.constexpr, TANH: tl.constexpr):
    """Value and derivative at fp32 `x`, from one tanh or erf."""
    if ACTIVATION == "gelu_tanh":
        t = tanh(x * (GELU_SCALE + (GELU_SCALE * GELU_CUBIC) * x * x), TANH)
        half = 0.5 + 0.5 * t
        inner = GELU_SCALE + (3.0 * GELU_SCALE * GELU_CUBIC) * x * x
        return x * half, half + 0.5 * x * (1.0 - t * t) * inner
    elif ACTIVATION == "gelu":
        half = 0.5 + 0.5 * tl.erf(x * ROOT_HALF)
        return x * half, half + x * NORMAL_DENSITY * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "relu":
        # A NaN stays NaN, and the slope at 0 is 0, as in torch
        return tl.where(x < 0.0, 0.0, x), tl.where(x > 0.0, 1.0, 0.0)
    else:
        sigmoid = 0.5 + 0.5 * tanh(0.5 * x, TANH)
        return x * sigmoid, sigmoid * (1.0 + x * (1.0 - sigmoid))
