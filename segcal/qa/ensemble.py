"""QA of the members themselves: pooled, calibrated and compared with each other in one read of each case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from segcal.cases import Want, load_poolings
from segcal.fitted import FittedCalibrator
from segcal.manifest import Manifest
from segcal.qa.case import QaMaps
from segcal.qa.members import MemberTally
from segcal.qa.outlyingness import case_statistics
from segcal.qa.sources import Source


class Ensemble(Source):
    """The cases of a manifest, calibrated on the way; nothing is written and no label is read."""

    def __init__(
        self,
        manifest: Manifest,
        fitted: FittedCalibrator,
        *,
        device: torch.device,
        cases: Sequence[str] | None = None,
        force: bool = False,
        keep_case: bool = False,
    ) -> None:
        self.warnings = tuple(fitted.check_compatible(manifest, fitted.info.pooling, force=force))
        self._manifest, self._fitted, self._device, self._keep_case = manifest, fitted, device, keep_case
        chosen = manifest.cases if cases is None else [manifest.case(case_id) for case_id in dict.fromkeys(cases)]
        self.ids = tuple(case.id for case in chosen)
        self.names = tuple(manifest.class_names) if manifest.has_regions else tuple(manifest.class_names[1:])
        self.reference = fitted.info.reference_statistics
        self.describe = {
            "source": "manifest",
            "name": manifest.name,
            "method": fitted.info.method,
            "calibrator_sha256": fitted.sha256,
        }

    def load(self, case_id: str) -> QaMaps:
        manifest, regions = self._manifest, self._manifest.has_regions
        case = manifest.case(case_id)
        tally = MemberTally(regions=regions)
        wanted = [Want(self._fitted.info.pooling)]
        (data,) = load_poolings(manifest, case, wanted, device=self._device, with_labels=False, on_member=tally.add)
        probs = self._fitted.volume_probs(data)
        rest: dict[str, Any] = {
            "inside": data.inside,
            "grid": data.grid,
            "tally": tally,
            "statistics": case_statistics(data, regions=regions, fitted_on=self._fitted.info.kind),
            "image": None if case.image is None else manifest.resolve(case.image),
            "case": data if self._keep_case else None,
        }
        keeps = self._fitted.info.preserves is not None
        if regions:
            return QaMaps.of_regions(case_id, probs, data.decision if keeps else probs > 0.5, **rest)
        return QaMaps.of_classes(case_id, probs, data.decision if keeps else probs.max(0).indices, **rest)
