"""Measuring as work over cases: what `segcal.case_map` runs, here or on many machines."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from segcal.evaluation.measure import MeasuredCase, measure_case
from segcal.evaluation.pipelines import Pipeline
from segcal.manifest import Manifest
from segcal.metrics import MetricSettings


@dataclass(frozen=True, slots=True)
class MeasureWork:
    """From the id of a case to what is left of it; see `measure_case`."""

    manifest: Manifest
    pipelines: tuple[Pipeline, ...]
    settings: MetricSettings
    device: torch.device
    pictured: str | None = None
    count_outside: bool = True

    def __call__(self, case_id: str) -> MeasuredCase:
        return measure_case(
            self.manifest,
            self.manifest.case(case_id),
            self.pipelines,
            self.settings,
            device=self.device,
            pictured=self.pictured,
            count_outside=self.count_outside,
        )
