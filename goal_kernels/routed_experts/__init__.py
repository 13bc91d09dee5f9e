"""Mixture of experts whose router sees a token and the condition shared by its group (MoE equation of the paper).

Legend of the shapes: N tokens, D channels, G groups, Dc channels of a condition, E experts, H hidden channels, k
experts chosen for a token. Every op takes fp32, fp16, bf16 and fp64, any strides and zero-size inputs, works under
`torch.compile(fullgraph=True)`, CUDA graph capture and autocast (tokens and expert matrices take autocast's dtype; the
router and the biases keep theirs), and gives the same bits on every run.
"""

from __future__ import annotations

from torch import Tensor

from goal_kernels._checks import (
    check_choice,
    check_integer,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_tensor,
    debugging,
)
from goal_kernels._precision import autocast
from goal_kernels.backend import backend_for, fall_back
from goal_kernels.routed_experts import eager
from goal_kernels.routed_experts.eager import ACTIVATIONS, LoadStatistics, Routing

__all__ = ["LoadStatistics", "Routing", "load_balancing_loss", "load_statistics", "route_topk", "routed_experts"]


def route_topk(z: Tensor, condition: Tensor, gate_weight: Tensor, *, k: int) -> Routing:
    """Choose k experts for every token: `softmax([z; condition] @ gate_weight.T)`, top k, renormalised.

    Ties go to the lowest expert id. A row with NaN or +inf logits gets NaN weights and the ids 0..k-1: unique and in
    range, so that one bad token cannot corrupt the others. With `GOAL_KERNELS_DEBUG=1` in the environment such a row
    is an error instead.

    Args:
        z: `(N, D)` tokens.
        condition: `(G, Dc)`, shared by groups of consecutive tokens: token i has condition `i // (N // G)`. Any dtype.
        gate_weight: `(E, D + Dc)`, any floating dtype.
        k: experts a token, between 1 and E.

    Returns:
        `Routing`: weights `(N, k)`, experts `(N, k)` and probabilities `(N, E)`, computed in fp32 (fp64 for fp64 z).

    Raises:
        TypeError: an argument is not a floating tensor, or k is not an int.
        ValueError: shapes or devices do not fit together, N is no multiple of G, or k is out of range.

    Example:
        >>> import torch
        >>> z, condition = torch.tensor([[1.0], [-1.0]]), torch.zeros(1, 1)
        >>> gate_weight = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]])
        >>> route_topk(z, condition, gate_weight, k=2).experts
        tensor([[0, 1],
                [2, 1]])
    """
    _check_router(z, condition, gate_weight, k)
    implementation = eager.route_topk
    if backend_for(z) == "triton":
        from goal_kernels.routed_experts import triton as kernels

        if kernels.supports(z, gate_weight.shape[0], k):
            implementation = kernels.route_topk
        else:
            fall_back("route_topk", kernels.LIMITS)
    return _check_routing(implementation(z, condition, gate_weight, k=k))


def routed_experts(
    z: Tensor,
    condition: Tensor,
    gate_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    *,
    k: int,
    activation: str = "gelu_tanh",
) -> tuple[Tensor, Routing]:
    """Weighted sum of the k chosen experts, each an MLP `activation(z @ w1[e] + b1[e]) @ w2[e] + b2[e]`.

    Gradients reach every argument; those of the router flow through the renormalised weights. An expert that serves no
    token gets gradients of exactly zero.

    Args:
        z: `(N, D)` tokens.
        condition: `(G, Dc)`, shared by groups of consecutive tokens: token i has condition `i // (N // G)`. Any dtype.
        gate_weight: `(E, D + Dc)`, any floating dtype.
        w1, w2: `(E, D, H)` and `(E, H, D)`, the dtype of `z`.
        b1, b2: `(E, H)` and `(E, D)`, any floating dtype.
        k: experts a token, between 1 and E.
        activation: `"gelu_tanh"` (the fast one), `"gelu"` (erf), `"relu"` or `"silu"`.

    Returns:
        out: `(N, D)` in the dtype of `z`.
        routing: as `route_topk` gives it; its probabilities feed `load_statistics` and `load_balancing_loss`.

    Raises:
        TypeError: an argument is not a floating tensor, `w1` or `w2` differs from `z` in dtype, or k is not an int.
        ValueError: shapes or devices do not fit together, N is no multiple of G, or k or activation is unknown.
    """
    check_tensor("z", z)
    check_tensor("w1", w1)
    check_tensor("w2", w2)
    z, w1, w2 = autocast(z, w1, w2)
    _check_router(z, condition, gate_weight, k)
    channels, experts = z.shape[1], gate_weight.shape[0]
    check_shape("w1", w1, (experts, channels, None), "(E, D, H)")
    hidden = w1.shape[2]
    check_shape("w2", w2, (experts, hidden, channels), "(E, H, D)")
    for argument, bias, length, axes in (("b1", b1, hidden, "(E, H)"), ("b2", b2, channels, "(E, D)")):
        check_tensor(argument, bias)
        check_shape(argument, bias, (experts, length), axes)
    check_same_dtype("z", z, w1=w1, w2=w2)
    check_same_device("z", z, w1=w1, b1=b1, w2=w2, b2=b2)
    check_choice("activation", activation, ACTIVATIONS)
    implementation = eager.routed_experts
    if backend_for(z) == "triton":
        from goal_kernels.routed_experts import triton as kernels

        if kernels.supports(z, experts, k, hidden):
            implementation = kernels.routed_experts
        else:
            fall_back("routed_experts", kernels.LIMITS)
    out, routing = implementation(z, condition, gate_weight, w1, b1, w2, b2, k=k, activation=activation)
    return out, _check_routing(routing)


def load_statistics(routing: Routing) -> LoadStatistics:
    """Tokens per expert and the router's mean entropy, for a training log; on the device, without a synchronisation.

    Args:
        routing: what `route_topk` or `routed_experts` returned.
    """
    return eager.load_statistics(routing)


def load_balancing_loss(routing: Routing) -> Tensor:
    """`E * sum_e f_e * p_e`, with f_e the share of (token, expert) pairs and p_e the mean probability of expert e.

    1 when the load is even, E when all of it falls on one expert. Differentiable through the probabilities. The paper
    trains without it, so nothing adds it unless asked; a usual weight is 0.01.

    Source: Fedus et al. 2021, Switch Transformers, equation 4, for k >= 1.

    Args:
        routing: what `route_topk` or `routed_experts` returned.

    Returns:
        Scalar in the dtype of `routing.probabilities`; 0 without tokens.
    """
    return eager.load_balancing_loss(routing)


def _check_router(z: Tensor, condition: Tensor, gate_weight: Tensor, k: int) -> None:
    for argument, value in (("z", z), ("condition", condition), ("gate_weight", gate_weight)):
        check_tensor(argument, value)
    check_shape("z", z, (None, None), "(N, D)")
    check_shape("condition", condition, (None, None), "(G, Dc)")
    check_shape("gate_weight", gate_weight, (None, z.shape[1] + condition.shape[1]), "(E, D + Dc)")
    check_same_device("z", z, condition=condition, gate_weight=gate_weight)
    check_integer("E, the number of rows of gate_weight", gate_weight.shape[0], minimum=1)
    check_integer("k", k, minimum=1, maximum=gate_weight.shape[0])
    tokens, groups = z.shape[0], condition.shape[0]
    if (groups == 0 and tokens > 0) or (groups > 0 and tokens % groups != 0):
        raise ValueError(
            f"z has {tokens} tokens and condition {groups} rows; expected N to be a multiple of G, "
            f"with the tokens of one condition next to each other"
        )


def _check_routing(routing: Routing) -> Routing:
    if debugging():
        lost = routing.probabilities.detach().isnan().any(dim=-1)
        if lost.any():
            raise ValueError(
                f"the router's logits are NaN or inf for {int(lost.sum())} of {lost.numel()} tokens, first for token "
                f"{int(lost.nonzero()[0])}; look for NaN or inf in z, condition and gate_weight"
            )
    return routing
