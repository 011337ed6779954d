"""What the measures of a report mean, with the settings that were used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from segcal.report.pooled import band_words
from segcal.report.wording import listing


def definitions(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(term, meaning), in the order of the tables."""
    metrics, how = summary["settings"]["metrics"], summary["settings"]["bootstrap"]
    counted = "all classes" if metrics.get("include_background") or summary.get("regions") else "the foreground classes"
    return [
        ("confidence", "The probability that the map gives to the class it predicts."),
        ("NLL", "Mean over voxels of −log of the probability given to the true class, in nats; then mean over cases."),
        ("Brier", "Mean over voxels of the squared distance between the probabilities and the truth (0 to 2)."),
        ("ECE", _ece(metrics)),
        ("BA-ECE", _ba_ece(metrics)),
        ("ACE", _ace(metrics)),
        (
            "DSC",
            f"Dice score of the segmentation, mean over {counted} that the label or the segmentation has; "
            "then mean over cases.",
        ),
        (
            "flips",
            "Voxels whose predicted class differs from that of the uncalibrated ensemble with the same pooling. "
            "Harmful: right before, wrong now. Beneficial: wrong before, right now. Neutral: wrong both times.",
        ),
        (
            "free energy",
            "log Σ exp(logit): the part of the logits that softmax ignores. Methods that do not ignore logit offsets "
            "see it, and its spread over a case says how much that can matter.",
        ),
        ("intervals", _intervals(how)),
    ]


def _ece(metrics: Mapping[str, Any]) -> str:
    return (
        f"Expected calibration error of the predicted class: |accuracy − confidence| in {metrics['ece_bins']} equal "
        "bins of confidence, weighted by voxels; per case, then mean over cases."
    )


def _ba_ece(metrics: Mapping[str, Any]) -> str:
    bands = listing(band_words(metrics["band_edges"]))
    inverse = metrics.get("band_weights") == "inverse_distance"
    weights = "weighted by 1 / (1 + mean distance in the band)" if inverse else "all bands weighted alike"
    return (
        f"Boundary-aware error: |accuracy − mean confidence| in bands of distance to the true boundary ({bands} "
        f"voxels), {weights}; per case, then mean over cases."
    )


def _ace(metrics: Mapping[str, Any]) -> str:
    return (
        "Average calibration error: unweighted mean of |accuracy − confidence| over those of "
        f"{metrics['ace_bins']} bins that hold voxels, the voxels of all cases of a repeat pooled. Noise can only "
        "raise it; below its noise limit (tooltips of the table) it cannot be told from 0."
    )


def _intervals(how: Mapping[str, Any]) -> str:
    level = f"{100 * float(how['confidence_level']):g} %"
    return (
        f"{level}, from {int(how['n_replicates']):,} bootstrap replicates. Two-level: "
        "repeats are resampled, then cases within each. By subject: subjects are resampled jointly over all repeats. "
        "Percentile intervals; for ACE the basic (reflected) ones."
    )
