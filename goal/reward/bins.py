"""Sizes that a positive outcome comes in, so that a network says how likely each is and not only what they average."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MOST_BINS = 8


@dataclass(frozen=True)
class Bins:
    """K intervals that divide the positive numbers, with the mean of what lies in each.

    Attributes:
        edges: `(K - 1,)` ascending; a value on an edge belongs to the lower bin.
        means: `(K,)` ascending, above 0.
    """

    edges: tuple[float, ...]
    means: tuple[float, ...]

    @classmethod
    def fit(cls, values: np.ndarray) -> Bins:
        """One bin for each distinct positive value, or `MOST_BINS` of about equally many where there are more.

        Args:
            values: `(n,)` outcomes of the training rows; what is not positive takes no part. Without a positive one
                there is one bin, of mean 1.

        Example:
            >>> Bins.fit(np.array([0.0, 5.0, 35.0, 5.0]))
            Bins(edges=(5.0,), means=(5.0, 35.0))
        """
        positive = np.sort(values[values > 0].astype(np.float64))
        if len(positive) == 0:
            return cls((), (1.0,))
        distinct = np.unique(positive)
        if len(distinct) > MOST_BINS:
            shares = np.arange(1, MOST_BINS) / MOST_BINS
            upper = np.unique(np.quantile(positive, shares, method="inverted_cdf"))
            upper = upper[upper < distinct[-1]]
        else:
            upper = distinct[:-1]
        index = np.searchsorted(upper, positive)
        means = np.bincount(index, weights=positive) / np.bincount(index)
        return cls(tuple(upper.tolist()), tuple(means.tolist()))
