"""SCPO loss on a GPU, forward and backward: ours against plain torch, compiled, and each as a graph.

python benchmarks/gpu/loss.py --out runs/gpu_check
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from measuring import Row, main, relative_error
from torch import Tensor

from goal_kernels.scpo_loss import eager, scpo_loss

DTYPE = torch.bfloat16
SEQUENCES, STEPS, VOCABULARY = 57344, 8, 64
# floor and wanted ratio by KL (H100)
LIMITS = {"k3": (0.06, 0.085 / 0.781), "exact": (0.06, 0.10 / 0.781)}
OPTIONS = {"clip_low": 0.2, "clip_high": 0.2, "kl_weight": 0.05, "ratio": "sequence"}


def arguments() -> dict[str, Tensor]:
    """Full sequences: the floor counts every logit."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (SEQUENCES, STEPS, VOCABULARY)
    logits = torch.randn(shape, generator=generator, device="cuda").to(DTYPE)
    reference = (logits.float() + 0.3 * torch.randn(shape, generator=generator, device="cuda")).to(DTYPE)
    tokens = torch.randint(VOCABULARY, shape[:2], generator=generator, device="cuda")
    chosen = logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    return {
        "logits": logits.requires_grad_(),
        "reference_logits": reference,
        "tokens": tokens,
        "old_log_probs": chosen + 0.1 * torch.randn(shape[:2], generator=generator, device="cuda"),
        "lengths": torch.full((SEQUENCES,), STEPS, device="cuda"),
        "advantages": torch.randn(SEQUENCES, generator=generator, device="cuda"),
    }


def step(function: Callable[..., eager.ScpoLoss], tensors: dict[str, Tensor], kl: str) -> tuple[Tensor, Tensor]:
    loss = function(**tensors, **OPTIONS, kl=kl).loss
    return loss, torch.autograd.grad(loss, tensors["logits"])[0]


def errors(kl: str) -> dict[str, float]:
    """Relative errors of the loss and of its gradient against fp64."""
    tensors = arguments()
    exact = {name: value.detach().double() if value.is_floating_point() else value for name, value in tensors.items()}
    exact["logits"].requires_grad_()
    pairs = zip(step(scpo_loss, tensors, kl), step(eager.scpo_loss, exact, kl), strict=True)
    return {name: relative_error(*pair) for name, pair in zip(("loss", "gradient"), pairs, strict=True)}


def prepare(kl: str) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    """Functions to time."""
    tensors = arguments()
    torch.compiler.reset()
    peers = {"torch": eager.scpo_loss, "compiled": torch.compile(eager.scpo_loss)}
    timed = {name: partial(step, function, tensors, kl) for name, function in peers.items()}
    return {"ours": partial(step, scpo_loss, tensors, kl)}, timed


def rows() -> list[Row]:
    """The table's rows."""
    return [
        Row(
            f"scpo loss {kl}, G{SEQUENCES} T{STEPS} V{VOCABULARY}",
            DTYPE,
            floor,
            {"any": goal},
            partial(errors, kl),
            partial(prepare, kl),
        )
        for kl, (floor, goal) in LIMITS.items()
    ]


if __name__ == "__main__":
    main(rows(), "loss")
