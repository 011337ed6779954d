"""ACE of pooled bin tables, and of all bootstrap draws of them at once."""

from __future__ import annotations

import numpy as np

from segcal.metrics.resampling import Floats, exact_product


def resampled_ace(weights: Floats, tables: Floats) -> Floats:
    """(draw, pipeline) ACE of cases pooled under (draw, case) weights.

    Args:
        weights: (draw, case) whole numbers.
        tables: (pipeline, case, channel, 3, B).
    """
    n_pipelines, n_cases, n_channels, _, n_bins = tables.shape
    by_case = np.moveaxis(tables, 1, 0)
    counts = by_case[..., 0, :].reshape(n_cases, -1)
    excess = (by_case[..., 1, :] - by_case[..., 2, :]).reshape(n_cases, -1)
    shape = (len(weights), n_pipelines, n_channels, n_bins)
    return _ace((weights @ counts).reshape(shape), exact_product(weights, excess).reshape(shape))


def without_gaps(tables: Floats) -> Floats:
    """(pipeline, case, channel, 3, B) tables made to be calibrated when pooled, their spread over cases kept."""
    counts, confidence, hits = np.moveaxis(tables, -2, 0)
    pooled = counts.sum(axis=1, keepdims=True)
    gap = (confidence - hits).sum(axis=1, keepdims=True) / np.where(pooled > 0, pooled, 1.0)
    return np.stack([counts, confidence - counts * gap, hits], axis=-2)


def pooled_ace(table: Floats) -> Floats:
    """(...,) ACE of (..., channel, 3, B) tables: mean gap of the non-empty bins, then mean over channels."""
    return _ace(table[..., 0, :], table[..., 1, :] - table[..., 2, :])


def _ace(counts: Floats, excess: Floats) -> Floats:
    """(...,) from (..., channel, B) counts and sums of confidence minus hits."""
    filled = counts > 0
    gaps = np.abs(excess) / np.where(filled, counts, 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        by_channel = np.where(filled, gaps, 0.0).sum(axis=-1) / filled.sum(axis=-1)
        defined = np.isfinite(by_channel)
        return np.asarray(np.where(defined, by_channel, 0.0).sum(axis=-1) / defined.sum(axis=-1))
