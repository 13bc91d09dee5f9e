"""SCPO loss, forward and backward, against what one would write first, on whatever device is there.

    pytest benchmarks/test_scpo_loss.py

Small shapes: on CPU this compares the eager implementation, which leaves the padding out; on a GPU the kernels. The
table of the large shape is `benchmarks/gpu/loss.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from goal_kernels import scpo_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# sequences, steps, vocabulary; lengths as greedy token sequences have them, mostly short
SHAPES = [(5000, 2, 14), (5000, 8, 64)]


def ours(tensors: dict[str, Tensor], kl: str) -> Tensor:
    return scpo_loss(**tensors, clip_low=0.2, clip_high=0.2, kl_weight=0.05, kl=kl).loss


def masked(tensors: dict[str, Tensor], kl: str) -> Tensor:
    """Every position, multiplied by a mask."""
    log_probs, reference = tensors["logits"].log_softmax(-1), tensors["reference_logits"].log_softmax(-1)
    mask = torch.arange(log_probs.shape[1], device=DEVICE) < tensors["lengths"][:, None]
    chosen = log_probs.gather(-1, tensors["tokens"][..., None]).squeeze(-1)
    ratio = ((chosen - tensors["old_log_probs"]) * mask).sum(1).exp()
    gain = torch.minimum(ratio * tensors["advantages"], ratio.clamp(0.8, 1.2) * tensors["advantages"])
    if kl == "exact":
        divergence = (log_probs.exp() * (log_probs - reference)).sum(-1)
    else:
        gap = reference.gather(-1, tensors["tokens"][..., None]).squeeze(-1) - chosen
        divergence = gap.exp() - gap - 1
    return (0.05 * (divergence * mask).sum(1) - gain).mean()


CONTESTANTS = {"ours": ours, "masked": masked}


@pytest.mark.parametrize("contestant", CONTESTANTS)
@pytest.mark.parametrize("kl", ["exact", "k3"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_loss(benchmark, shape: tuple[int, int, int], kl: str, contestant: str) -> None:
    benchmark.group = f"scpo loss {kl} {shape} {DEVICE}"
    torch.manual_seed(0)
    logits = torch.randn(shape, device=DEVICE)
    tokens = torch.randint(shape[2], shape[:2], device=DEVICE)
    tensors = {
        "logits": logits.requires_grad_(),
        "reference_logits": logits.detach() + 0.3 * torch.randn(shape, device=DEVICE),
        "tokens": tokens,
        "old_log_probs": logits.detach().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1),
        "lengths": torch.randint(1, min(shape[1], 4) + 1, (shape[0],), device=DEVICE),
        "advantages": torch.randn(shape[0], device=DEVICE),
    }
    function = CONTESTANTS[contestant]
    torch.testing.assert_close(function(tensors, kl), masked(tensors, kl), atol=1e-5, rtol=1e-4)

    def run() -> None:
        torch.autograd.grad(function(tensors, kl), logits)
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(run, rounds=10, warmup_rounds=2)
