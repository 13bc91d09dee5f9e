"""Every amount that may be written as one tree of tokens, so that a beginning that many share is computed once.

Shapes: m amounts, T tokens, N nodes, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from goal.tokenizer import PAD, SOS


def with_start(tokens: torch.Tensor) -> torch.Tensor:
    """Inputs that predict ``tokens`` `(..., T)`: SOS, then all but the last."""
    return torch.cat([torch.full_like(tokens[..., :1], SOS), tokens[..., :-1]], dim=-1)


class TokenTree(nn.Module):
    """The start, the beginnings after which there is a choice, and those that lead to them.

    Args:
        sequences: `(m, T)` ids from the first to EOS, PAD after it; all that may be written.
        choices: `(m, T, V)` bool, what the rules let stand at each place.
    """

    sequences: torch.Tensor
    """`(m, T)` as given, cut after the last place at which any of them has a choice."""
    lengths: torch.Tensor
    """`(m,)` of the cut sequences, EOS counted where it is left."""
    choices: torch.Tensor
    """`(m, T, V)`, cut alike."""
    tokens: torch.Tensor
    """`(N,)` last id of each beginning."""
    depths: torch.Tensor
    """`(N,)` ids before it."""
    sees: torch.Tensor
    """`(N, N)` bool: which nodes a node's beginning consists of."""
    node: torch.Tensor
    """`(m, T)` which node decides a token; N where there is no choice."""

    def __init__(self, sequences: torch.Tensor, choices: torch.Tensor) -> None:
        super().__init__()
        has_choice = choices.sum(dim=-1) > 1
        width = max(1, int(has_choice.any(dim=0).nonzero().amax()) + 1 if has_choice.any() else 0)
        sequences, choices, has_choice = sequences[:, :width], choices[:, :width], has_choice[:, :width]
        nodes: dict[tuple[int, ...], int] = {(SOS,): 0}
        node = torch.full(sequences.shape, -1)
        for depth in range(width):
            for row, ids in enumerate(sequences.tolist()):
                if bool(has_choice[row, depth:].any()):
                    index = nodes.setdefault((SOS, *ids[:depth]), len(nodes))
                    if has_choice[row, depth]:
                        node[row, depth] = index
        node[node < 0] = len(nodes)
        sees = torch.zeros(len(nodes), len(nodes), dtype=torch.bool)
        for beginning, index in nodes.items():
            for length in range(1, len(beginning) + 1):
                sees[index, nodes[beginning[:length]]] = True
        of_nodes = {
            "tokens": torch.tensor([beginning[-1] for beginning in nodes], dtype=torch.int64),
            "depths": torch.tensor([len(beginning) - 1 for beginning in nodes], dtype=torch.int64),
        }
        lengths = (sequences != PAD).sum(dim=1)
        tensors = {"sequences": sequences, "lengths": lengths, "choices": choices, "sees": sees, "node": node}
        for name, tensor in {**tensors, **of_nodes}.items():
            self.register_buffer(name, tensor, persistent=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Put the nodes' logits `(B, N, V)` at the places of the sequences, `(B, m, T, V)`; 0 where is no choice."""
        batch, _, size = logits.shape
        logits = torch.cat([logits, logits.new_zeros(batch, 1, size)], dim=1)
        return logits.index_select(1, self.node.flatten()).view(batch, *self.node.shape, size)
