"""Types of the extension that csrc/ builds."""

import numpy as np

def build_vocabulary(
    values: np.ndarray,
    q_start: float,
    q_end: float,
    decay: float,
    relative_error: float,
    min_unit: float,
    max_tokens: int,
    threads: int,
) -> np.ndarray: ...
def encode(
    values: np.ndarray, vocabulary: np.ndarray, max_length: int, truncate: bool, threads: int
) -> tuple[np.ndarray, np.ndarray, int]: ...
def decode(tokens: np.ndarray, vocabulary: np.ndarray, threads: int) -> np.ndarray: ...
