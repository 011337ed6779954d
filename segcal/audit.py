"""Does a calibrator keep what it declares? Shifts, decisions and ranks, checked on the cases it is meant for.

Translation invariance (SEG 3.1): softmax does not see a constant added to all logits of a voxel, so a calibrator
should not either. The audit adds a random shift c(v), different in every voxel, and reports how far any calibrated
probability moves. Whether such shifts happen in practice shows in the spatial standard deviation of the pooled free
energy F(z) = logsumexp(z) (SEG Tables 3 and 5).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators.base import Preserves
from segcal.cases import CaseData, load_case
from segcal.device import resolve_device
from segcal.fitted import FittedCalibrator
from segcal.manifest import Manifest
from segcal.metrics.energy import FreeEnergy
from segcal.types import Pooling, Progress

SHIFT_RANGE = 8.0
"""Shifts are drawn uniformly from ±8, the size of the free energy's spatial spread in trained networks."""

SHIFT_TOLERANCE = 1e-4
"""Adding 8 to a logit of 20 rounds it by 1e-6 in float32, and a fitted map may enlarge that a few dozen times."""

ORDER_TOLERANCE = 1e-6
"""Equal probabilities may come out in either order by this relative rounding."""

_ROWS_PER_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class CaseAudit:
    """What one case showed.

    Attributes:
        n_voxels: voxels inside the crop; the others are background by definition and never calibrated.
        shift_change: largest |Δp| under the random shift; None for regions, whose log-odds have no free shift.
        n_flips: voxels whose calibrated decision is not the pooled one.
        n_reordered: voxels in which two classes changed their rank; None for regions.
        free_energy_std: spatial standard deviation of the pooled free energy; None for regions.
    """

    case_id: str
    n_voxels: int
    shift_change: float | None
    n_flips: int
    n_reordered: int | None
    free_energy_std: float | None


class Spread(NamedTuple):
    """Mean over cases with quartiles, as SEG Table 3 prints it."""

    mean: float
    p25: float
    p50: float
    p75: float


class Verdict(NamedTuple):
    """One sentence about one property; `holds` is None where nothing was declared."""

    text: str
    holds: bool | None


@dataclass(frozen=True, slots=True)
class Audit:
    """The audit of a calibrator on a manifest."""

    method: str
    pooling: Pooling
    translation_invariant: bool
    preserves: Preserves
    cases: tuple[CaseAudit, ...]
    warnings: tuple[str, ...]

    @property
    def n_voxels(self) -> int:
        """Voxels looked at."""
        return sum(case.n_voxels for case in self.cases)

    @property
    def n_flips(self) -> int:
        """Flips over all cases."""
        return sum(case.n_flips for case in self.cases)

    @property
    def shift_change(self) -> float | None:
        """Largest |Δp| over all cases."""
        return max((case.shift_change for case in self.cases if case.shift_change is not None), default=None)

    @property
    def free_energy_std(self) -> Spread | None:
        """Spread of the free energy's spatial standard deviation over the cases."""
        values = [case.free_energy_std for case in self.cases if case.free_energy_std is not None]
        if not values:
            return None
        return Spread(float(np.mean(values)), *(float(q) for q in np.percentile(values, [25, 50, 75])))

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """One sentence per property."""
        return (self._shift_verdict(), self._flip_verdict(), *self._order_verdict())

    @property
    def holds(self) -> bool:
        """Whether everything that was declared is true of these cases."""
        return all(verdict.holds is not False for verdict in self.verdicts)

    def _shift_verdict(self) -> Verdict:
        change = self.shift_change
        if change is None:
            return Verdict("translation invariance: not a question for regions, log-odds have no free shift", None)
        seen = f"max |Δp| {change:.1e} under shifts of ±{SHIFT_RANGE:g}"
        if not self.translation_invariant:
            return Verdict(f"not declared translation-invariant: {seen}", None)
        holds = change <= SHIFT_TOLERANCE
        return Verdict(f"declared translation-invariant: {_word(holds)} ({seen})", holds)

    def _flip_verdict(self) -> Verdict:
        share = self.n_flips / max(self.n_voxels, 1)
        seen = f"{self.n_flips:,} flips in {self.n_voxels:,} voxels"
        if self.preserves is None:
            return Verdict(f"not declared decision-preserving: {seen} ({share:.2%})", None)
        holds = self.n_flips == 0
        return Verdict(f"declared decision-preserving: {_word(holds)} ({seen})", holds)

    def _order_verdict(self) -> tuple[Verdict, ...]:
        counts = [case.n_reordered for case in self.cases if case.n_reordered is not None]
        if self.preserves != "order" or not counts:
            return ()
        holds = sum(counts) == 0
        return (Verdict(f"declared order-preserving: {_word(holds)} ({sum(counts):,} voxels reordered)", holds),)


def audit_calibrator(
    fitted: FittedCalibrator,
    manifest: Manifest,
    *,
    seed: int = 0,
    device: torch.device | str = "auto",
    force: bool = False,
    cases: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Check a calibrator's declarations on the cases of a manifest; no labels are needed.

    Args:
        seed: Shifts are drawn from (seed, case id), so they do not depend on the choice or order of cases.
        device: Where voxels are processed.
        force: Audit in spite of a mismatch between calibrator and manifest.
        cases: Ids to look at; all when absent.
    """
    on_device = resolve_device(device, sums=True)
    warnings = fitted.check_compatible(manifest, fitted.info.pooling, force=force)
    chosen = manifest.cases if cases is None else tuple(manifest.case(case_id) for case_id in cases)
    found = []
    for done, case in enumerate(chosen):
        if progress is not None:
            progress("audit", done, len(chosen))
        data = load_case(manifest, case, pooling=fitted.info.pooling, device=on_device, with_labels=False)
        found.append(audit_case(fitted, data, regions=manifest.has_regions, seed=seed))
        del data
    if progress is not None:
        progress("audit", len(chosen), len(chosen))
    info = fitted.info
    declared = (info.translation_invariant, info.preserves)
    return Audit(info.method, info.pooling, *declared, tuple(found), tuple(warnings))


def audit_case(fitted: FittedCalibrator, case: CaseData, *, regions: bool, seed: int) -> CaseAudit:
    """Audit one loaded case."""
    probs = fitted.volume_probs(case)
    inside = torch.ones_like(case.logits[0], dtype=torch.bool) if case.inside is None else case.inside
    n_voxels = int(inside.sum())
    if regions:
        flips = ((probs > 0.5) != case.decision).any(0) & inside
        return CaseAudit(case.case_id, n_voxels, None, int(flips.sum()), None, None)
    flips = (probs.max(0).indices != case.decision) & inside
    shifted = replace(case, logits=_shifted(case, fitted.info.pooling, seed))
    change = float((fitted.volume_probs(shifted) - probs).abs().max())
    energy = FreeEnergy()
    energy.update(case.case_id, case.logits, inside=case.inside)
    return CaseAudit(
        case.case_id,
        n_voxels,
        change,
        int(flips.sum()),
        _count_reordered(case.logits, probs, inside),
        energy.compute()[case.case_id]["free_energy_std"],
    )


def _shifted(case: CaseData, pooling: Pooling, seed: int) -> Tensor:
    """Pooled logits as the calibrator would see them had every member's logits been shifted by c(v)."""
    name = hashlib.sha256(case.case_id.encode()).digest()[:8]
    rng = np.random.default_rng([seed, int.from_bytes(name, "big")])
    drawn = rng.random(tuple(case.logits.shape[1:]), dtype=np.float32)
    shift = torch.from_numpy(drawn).to(case.logits.device).sub_(0.5).mul_(2 * SHIFT_RANGE)
    shifted = case.logits + shift
    # Pooling by probability normalises each member, so a shift is gone before the calibrator sees it (SEG 3.3).
    return shifted.log_softmax(0) if pooling == "probabilities" else shifted


def _count_reordered(logits: Tensor, probs: Tensor, inside: Tensor) -> int:
    """Voxels in which a class with a smaller logit got a larger probability."""
    n_classes, total = logits.shape[0], 0
    flat_logits, flat_probs, flat_inside = (
        logits.reshape(n_classes, -1),
        probs.reshape(n_classes, -1),
        inside.reshape(-1),
    )
    for begin in range(0, flat_inside.shape[0], _ROWS_PER_CHUNK):
        part = slice(begin, begin + _ROWS_PER_CHUNK)
        ranked, order = flat_logits[:, part].sort(0, descending=True)
        values = flat_probs[:, part].gather(0, order)
        rises = values[1:] > values[:-1] * (1 + ORDER_TOLERANCE)
        # Equal logits have no order to keep.
        wrong = (rises & (ranked[1:] < ranked[:-1])).any(0) & flat_inside[part]
        total += int(wrong.sum())
    return total


def _word(holds: bool) -> str:
    return "holds" if holds else "DOES NOT HOLD"
