"""Incentive vocabulary and tokenizer: thin, checked Python over the native code.

Amounts are non-negative numbers in the incentive's own unit (coins, cents). A vocabulary is a descending float64 array;
token ``i`` stands for ``vocabulary[i]``. `goal_kernels.vocabulary.reference` is the same in readable Python.
"""

from __future__ import annotations

from goal_kernels.vocabulary.accumulator import VocabularyAccumulator
from goal_kernels.vocabulary.operations import Encoding, build_vocabulary, decode, encode

__all__ = ["Encoding", "VocabularyAccumulator", "build_vocabulary", "decode", "encode"]
