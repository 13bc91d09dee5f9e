"""The tree of all amounts against scoring each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from goal import History, Policy
from goal.model.tree import with_start
from goal.tokenizer import EOS, PAD, SOS

AMOUNTS = (0.0, 1.0, 2.0, 3.0, 7.0, 8.0, 15.0, 37.0, 137.0, 138.0, 145.0)


@pytest.mark.parametrize("layers", [1, 2])
def test_it_scores_as_its_sequences_do(
    layers: int, make_policy: Callable[..., Policy], make_history: Callable[..., History]
) -> None:
    policy = make_policy(allowed_amounts=AMOUNTS, decoder_layers=layers)
    tree = policy.choices.tree
    assert tree is not None
    assert len(tree) < tree.sequences.numel() / 2
    history, multiplier = make_history(5), torch.linspace(0, 3, 5)
    memory = policy.remember(policy.causal_states(history), history.lengths, multiplier)
    inside = torch.arange(tree.sequences.shape[1]) < tree.lengths[:, None]

    def log_probs(logits: torch.Tensor) -> torch.Tensor:
        chosen = logits.log_softmax(dim=-1).gather(-1, tree.sequences.expand(5, -1, -1)[..., None])[..., 0]
        return chosen.where(inside, 0).sum(dim=-1)

    found = []
    for logits in (policy.score_every(memory), policy.score(memory, with_start(tree.sequences).expand(5, -1, -1))):
        policy.zero_grad()
        log_pi = log_probs(logits)
        (log_pi * torch.linspace(-1, 1, len(AMOUNTS))).sum().backward(retain_graph=True)
        gradients = [p.grad for p in policy.decoder.parameters() if p.grad is not None]
        found.append((log_pi.detach(), torch.cat([g.flatten() for g in gradients])))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[0][0].exp().sum(dim=1), torch.ones(5))


def test_a_sequence_ends_where_no_choice_is_left(make_policy: Callable[..., Policy]) -> None:
    tree = make_policy(allowed_amounts=(0.0, 7.0, 37.0)).choices.tree
    assert tree is not None
    # 7 after 30 is forced, and so is every end but that of nothing.
    assert tree.sequences.tolist() == [[EOS], [5], [4]]
    assert tree.lengths.tolist() == [1, 1, 1] and tree.node.tolist() == [[0], [0], [0]]
    single = make_policy(allowed_amounts=(8.0,)).choices.tree
    assert single is not None
    assert len(single) == 1 and single.node.tolist() == [[1]] and single.sequences.tolist() == [[5]]
    two = make_policy(allowed_amounts=(0.0, 1.0, 2.0)).choices.tree
    assert two is not None
    assert two.sequences.tolist() == [[EOS, PAD], [6, EOS], [6, 6]]
    assert two.tokens.tolist() == [SOS, 6] and two.node.tolist() == [[0, 2], [0, 1], [0, 1]]
    assert two.sees.tolist() == [[True, False], [True, True]]
