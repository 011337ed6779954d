"""Exact gradients over all voxels as work over cases: what `segcal.case_map` runs for `--polish` and `--full`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from segcal.calibrators import Calibrator
from segcal.fitting.gather import stream_rows
from segcal.fitting.polish import Key, Sums, sum_gradients
from segcal.manifest import Manifest
from segcal.types import Pooling


@dataclass(frozen=True, slots=True)
class GradientWork:
    """From the id of a case to what it adds to the gradients of the given calibrators."""

    manifest: Manifest
    pooling: Pooling
    device: torch.device
    calibrators: Mapping[Key, Calibrator]

    def __call__(self, case_id: str) -> Sums:
        n_classes = 2 if self.manifest.has_regions else self.manifest.n_classes
        blocks = stream_rows(self.manifest, [case_id], pooling=self.pooling, device=self.device)
        return sum_gradients(self.calibrators, n_classes, blocks)
