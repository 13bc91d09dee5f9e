"""Fused operations behind `goal`: Triton kernels on CUDA, plain PyTorch elsewhere, and a C++ tokenizer.

`explain_backend()` says which path runs and why.
"""

from goal_kernels.backend import backend_for, explain_backend, set_backend
from goal_kernels.dilated_conv import causal_conv_block, causal_conv_stack, dilated_causal_conv
from goal_kernels.group_advantage import group_advantage
from goal_kernels.routed_experts import (
    LoadStatistics,
    Routing,
    load_balancing_loss,
    load_statistics,
    route_topk,
    routed_experts,
)
from goal_kernels.scpo_loss import ScpoLoss, scpo_loss
from goal_kernels.vocabulary import VocabularyAccumulator, build_vocabulary, decode, encode

__all__ = [
    "LoadStatistics",
    "Routing",
    "ScpoLoss",
    "VocabularyAccumulator",
    "backend_for",
    "build_vocabulary",
    "causal_conv_block",
    "causal_conv_stack",
    "decode",
    "dilated_causal_conv",
    "encode",
    "explain_backend",
    "group_advantage",
    "load_balancing_loss",
    "load_statistics",
    "route_topk",
    "routed_experts",
    "scpo_loss",
    "set_backend",
]
