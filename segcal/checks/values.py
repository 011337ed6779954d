"""Are the numbers in a member file what the manifest says they are? Small functions judge what one pass counted."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.checks.findings import Finding, Severity
from segcal.checks.value_counts import ValueCounts, box_around_others
from segcal.io.members import Member
from segcal.pooling import RANGE_TOLERANCE, SUM_TOLERANCE

FILL_SHARE = 1e-3
"""Share of voxels from which an exact (1, 0, ..., 0) in a logits file cannot be chance."""
CONSTANT_SHARE = 0.05
"""Share of voxels with one identical vector, of any other value, that is worth a warning."""
SATURATED_SHARE = 1e-3
"""Share of voxels with a probability of exactly 1 that is worth a word."""


class _Place(NamedTuple):
    case: str
    file: str

    def finding(self, code: str, severity: Severity, message: str) -> Finding:
        return Finding(code, severity, self.case, self.file, message)


def value_findings(member: Member, counts: ValueCounts, *, case: str, file: str, regions: bool) -> list[Finding]:
    """Judge the counts of one member."""
    place = _Place(case, file)
    found = [_non_finite(member, counts, place)]
    if member.kind == "probabilities":
        found += [_range(counts, place), None if regions else _sums(counts, place), _certain(member, counts, place)]
    elif not regions and counts.n_like_probabilities == counts.n_voxels:
        found.append(_not_logits(counts, place))
    else:
        found += [_at_limit(counts, place), _fill(member, counts, place, regions=regions)]
    return [finding for finding in found if finding is not None]


def _non_finite(member: Member, counts: ValueCounts, place: _Place) -> Finding | None:
    n_bad = counts.n_nan + counts.n_infinite
    if n_bad == 0:
        return None
    overflow = counts.n_infinite > 0 and member.values.dtype == np.float16
    way_out = (
        "float16 ends at 65504 and larger logits become Inf: export float32."
        if overflow
        else "Predict this case again; a network that diverged in training writes such files without an error."
    )
    text = f"{counts.n_nan:,} NaN and {counts.n_infinite:,} Inf among the values, expected finite numbers. {way_out}"
    return place.finding("non_finite", "fatal", text)


def _range(counts: ValueCounts, place: _Place) -> Finding | None:
    if counts.low >= -RANGE_TOLERANCE and counts.high <= 1 + RANGE_TOLERANCE:
        return None
    text = (
        f"declared as probabilities but holds values from {counts.low:.4g} to {counts.high:.4g}, expected 0 to 1. "
        "If the file holds logits, declare `kind: logits` and store them under the key `logits`."
    )
    return place.finding("probability_range", "fatal", text)


def _sums(counts: ValueCounts, place: _Place) -> Finding | None:
    if counts.n_off_sum == 0 or counts.low < -RANGE_TOLERANCE or counts.high > 1 + RANGE_TOLERANCE:
        return None
    severity: Severity = "fatal" if abs(counts.worst_sum - 1) > SUM_TOLERANCE else "warning"
    text = (
        f"the probabilities do not sum to 1 in {counts.share(counts.n_off_sum):.2%} of the voxels (worst sum "
        f"{counts.worst_sum:.4g}). A region-based model needs `regions` in the manifest; zeros around the predicted "
        "part need a `crop`."
    )
    return place.finding("probability_sum", severity, text)


def _certain(member: Member, counts: ValueCounts, place: _Place) -> Finding | None:
    share = counts.share(counts.n_certain)
    if share < SATURATED_SHARE:
        return None
    padding = (
        ""
        if member.crop is not None
        else " Padding around nnU-Net's crop looks the same; if there is some, set `crop` to the predicted box."
    )
    text = (
        f"a probability is exactly 1 in {share:.1%} of the voxels: {member.values.dtype} rounds it there and the odds "
        f"against the other classes are lost. Export logits (`segcal nnunet export`) to keep them.{padding}"
    )
    severity: Severity = "warning" if member.values.dtype == np.float16 else "note"
    return place.finding("saturated", severity, text)


def _not_logits(counts: ValueCounts, place: _Place) -> Finding:
    text = (
        f"declared as logits but all values lie between {counts.low:.4g} and {counts.high:.4g} and every voxel sums to "
        "1, as probabilities do. Set `kind: probabilities` and store them under the key `probabilities`."
    )
    return place.finding("logits_range", "fatal", text)


def _at_limit(counts: ValueCounts, place: _Place) -> Finding | None:
    if counts.n_at_limit == 0:
        return None
    text = (
        f"logits of {counts.low:.6g} to {counts.high:.6g}: {counts.n_at_limit:,} voxels are at or beyond 65504, where "
        "float16 ends and values are cut off. Export float32, or look at the network."
    )
    return place.finding("saturated", "warning", text)


def _fill(member: Member, counts: ValueCounts, place: _Place, *, regions: bool) -> Finding | None:
    """METHODS 3: padding meant for probabilities in a file of logits."""
    n_classes = member.values.shape[0]
    share_unit, share_zero = counts.share(counts.n_unit), counts.share(counts.n_zero)
    if not regions and share_unit >= FILL_SHARE:
        read_as = math.e / (math.e + n_classes - 1)
        seen, share, vector = "(1, 0, ..., 0)", share_unit, np.eye(n_classes)[0]
        meaning = f"as logits it says a background probability of {read_as:.3f} instead of 1"
    elif share_zero >= FILL_SHARE:
        read_as = 0.5 if regions else 1 / n_classes
        seen, share, vector = "all zeros", share_zero, np.zeros(n_classes)
        meaning = f"as logits it says a probability of {read_as:.3f} for every channel"
    else:
        return _constant(counts, place)
    text = (
        f"{share:.1%} of the voxels hold exactly {seen}: padding around the box nnU-Net predicted in; {meaning}. "
        f"Set `crop` in the npz or in a <case>.json beside it ({_box_hint(member, vector)})."
    )
    return place.finding("cropping_fill", "fatal", text)


def _constant(counts: ValueCounts, place: _Place) -> Finding | None:
    share = counts.share(counts.n_corner)
    if share < CONSTANT_SHARE:
        return None
    text = (
        f"{share:.1%} of the voxels hold one identical vector, that of a corner of the volume. If it is padding and "
        "not the network's answer to an empty image, set `crop` in the npz or in a <case>.json beside it."
    )
    return place.finding("constant_voxels", "warning", text)


def _box_hint(member: Member, vector: NDArray[np.float64]) -> str:
    box = box_around_others(member, vector)
    source = "nnU-Net keeps it as bbox_used_for_cropping in <case>.pkl"
    if box is None:
        return f"{source}; no voxel of this file holds anything else"
    rows = ", ".join(f"[{low}, {high}]" for low, high in box)
    return f"{source}; the smallest box around all other voxels is [{rows}] in z, y, x"
