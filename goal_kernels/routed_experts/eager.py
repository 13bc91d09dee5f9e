"""Routed experts in plain torch: the truth the kernels are tested against, and the path of CPU tensors.

Shapes: N tokens, D channels, G conditions of Dc channels, E experts, H hidden channels, k experts a token.
fp16 and bf16 are computed in fp32 inside, fp32 in fp32, fp64 in fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from goal_kernels._precision import compute_dtype, without_autocast

ACTIVATIONS = ("gelu_tanh", "gelu", "relu", "silu")

# Below this many (token, expert) pairs the sorting and gathering cost more than the multiplications they save
# (measured on one core, D 64, H 128, E 4, k 2: equal at 128 pairs, gathering 1.5 times faster at 1,024).
GATHER_PAIRS = 256


class Routing(NamedTuple):
    """Where each token goes.

    Attributes:
        weights: `(N, k)` renormalised probabilities of the chosen experts, fp32 (fp64 for fp64 inputs); differentiable.
        experts: `(N, k)` int64 ids of the chosen experts, most probable first, unique within a row.
        probabilities: `(N, E)` softmax over all experts, same dtype as `weights`; differentiable.
    """

    weights: Tensor
    experts: Tensor
    probabilities: Tensor


class LoadStatistics(NamedTuple):
    """How evenly tokens spread over the experts, all without gradient.

    Attributes:
        tokens: `(E,)` int64, how many (token, expert) pairs each expert serves; sums to `N * k`.
        entropy: scalar fp32, mean over tokens of the entropy of the router, in nats; at most `log(E)`.
    """

    tokens: Tensor
    entropy: Tensor


def activate(hidden: Tensor, activation: str) -> Tensor:
    """Apply one of `ACTIVATIONS`."""
    if activation == "gelu_tanh":
        return F.gelu(hidden, approximate="tanh")
    if activation == "gelu":
        return F.gelu(hidden)
    if activation == "relu":
        return F.relu(hidden)
    return F.silu(hidden)


def gate_logits(z: Tensor, condition: Tensor, gate_weight: Tensor) -> Tensor:
    """`[z; condition] @ gate_weight.T` as `(N, E)`, without building the concatenation.

    The part of the condition is computed once per group: token i has condition `i // (N // G)`.
    """
    tokens, channels = z.shape
    groups, experts = condition.shape[0], gate_weight.shape[0]
    logits = z @ gate_weight[:, :channels].T
    if groups == 0:  # only legal without tokens
        return logits
    shared = condition @ gate_weight[:, channels:].T
    return (logits.view(groups, tokens // groups, experts) + shared[:, None]).view(tokens, experts)


def select_experts(probabilities: Tensor, k: int) -> Tensor:
    """Ids `(N, k)` of the k largest probabilities, ties to the lowest id.

    `torch.topk` leaves the order of ties open, so each of the k rounds takes the first maximum. A taken expert is
    set to -1, below any probability. NaN counts as a maximum, so a row of NaN gives ids 0..k-1: unique and in range.
    """
    remaining = probabilities.detach()
    chosen = [remaining.argmax(dim=-1, keepdim=True)]
    for _ in range(k - 1):
        remaining = remaining.scatter(-1, chosen[-1], -1.0)
        chosen.append(remaining.argmax(dim=-1, keepdim=True))
    return torch.cat(chosen, dim=-1)


def route_topk(z: Tensor, condition: Tensor, gate_weight: Tensor, *, k: int) -> Routing:
    """Eager `goal_kernels.route_topk`."""
    with without_autocast(z.device.type):
        dtype = compute_dtype(z.dtype)
        logits = gate_logits(z.to(dtype), condition.to(dtype), gate_weight.to(dtype))
        probabilities = logits.softmax(dim=-1)
        experts = select_experts(probabilities, k)
        chosen = probabilities.gather(-1, experts)
        return Routing(chosen / chosen.sum(dim=-1, keepdim=True), experts, probabilities)


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
    """Eager `goal_kernels.routed_experts`."""
    routing = route_topk(z, condition, gate_weight, k=k)
    with without_autocast(z.device.type):
        dtype = compute_dtype(z.dtype)
        # Gathering needs the counts on the host: free on a CPU, a synchronisation on an accelerator, and a
        # data-dependent shape for torch.compile. Elsewhere every expert sees every token, weighted by zero.
        gather = z.device.type == "cpu" and routing.experts.numel() > GATHER_PAIRS and not torch.compiler.is_compiling()
        mixture = gathered_mixture if gather else dense_mixture
        w1, b1, w2, b2 = (tensor.to(dtype) for tensor in (w1, b1, w2, b2))
        out = mixture(z.to(dtype), routing.weights, routing.experts, w1, b1, w2, b2, activation)
    return out.to(z.dtype), routing


def dense_mixture(
    z: Tensor, weights: Tensor, experts: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, activation: str
) -> Tensor:
    """Every expert on every token, combined with a weight of zero where the expert was not chosen."""
    count = w1.shape[0]
    combine = z.new_zeros(z.shape[0], count).scatter(1, experts, weights)
    hidden = activate(torch.baddbmm(b1[:, None], z.expand(count, *z.shape), w1), activation)
    outputs = torch.baddbmm(b2[:, None], hidden, w2)
    return (outputs * combine.T[:, :, None]).sum(dim=0)


def gathered_mixture(
    z: Tensor, weights: Tensor, experts: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, activation: str
) -> Tensor:
    """Each expert on its own tokens only: `E / k` times fewer multiplications than `dense_mixture`."""
    flat = experts.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=w1.shape[0]).tolist()
    rows = (order // experts.shape[1]).split(counts)
    shares = weights.reshape(-1).index_select(0, order).split(counts)
    out = z.new_zeros(z.shape[0], w2.shape[2])
    for expert, (row, share) in enumerate(zip(rows, shares, strict=True)):
        hidden = activate(torch.addmm(b1[expert], z.index_select(0, row), w1[expert]), activation)
        out.index_add_(0, row, torch.addmm(b2[expert], hidden, w2[expert]) * share[:, None])
    return out


def load_statistics(routing: Routing) -> LoadStatistics:
    """Eager `goal_kernels.load_statistics`."""
    probabilities = routing.probabilities.detach()
    ids = torch.arange(probabilities.shape[1], device=probabilities.device)
    tokens = (routing.experts.reshape(-1, 1) == ids).sum(dim=0)
    entropy = torch.special.entr(probabilities).sum(dim=-1)
    return LoadStatistics(tokens, (entropy.sum() / max(entropy.numel(), 1)).float())


def load_balancing_loss(routing: Routing) -> Tensor:
    """Eager `goal_kernels.load_balancing_loss`."""
    tokens, count = routing.probabilities.shape
    pairs = max(routing.experts.numel(), 1)
    share = load_statistics(routing).tokens.to(routing.probabilities.dtype) / pairs
    mean = routing.probabilities.sum(dim=0) / max(tokens, 1)
    return count * (share * mean).sum()
