"""Applying as work over cases: from files to files, with a record of what was written.

In one process cases are read ahead by one: while a case is calibrated and written, the members of the next are being
unpacked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from segcal.applying.files import plan_files, write_case
from segcal.applying.inputs import input_fingerprints
from segcal.applying.maps import calibrated_maps, member_maps
from segcal.applying.record import ApplySettings, CaseEntry, Recipe
from segcal.calibrated_members import CalibratedMembers
from segcal.case_map import ReadAhead
from segcal.cases import CaseData, Want, load_case, load_poolings
from segcal.checks.tell_tales import TellTales
from segcal.fitted import FittedCalibrator
from segcal.manifest import Manifest
from segcal.types import Grid
from segcal.volumes import space_of


class CaseToApply(NamedTuple):
    """A case, and the files an earlier run made of it from other inputs or settings."""

    case_id: str
    stale: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.case_id


@dataclass(frozen=True, slots=True, eq=False)
class CaseRead:
    """A case in memory; `mean` is that of its calibrated members, if they are calibrated one by one."""

    recipe: Recipe
    data: CaseData
    seconds: float
    mean: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CaseApplied:
    """What the run keeps of a finished case."""

    entry: CaseEntry
    noticed: TellTales


@dataclass(frozen=True)
class ApplyWork(ReadAhead[CaseToApply, CaseRead, CaseApplied]):
    """One calibrator on one manifest into one folder: what `segcal.case_map` runs."""

    fitted: FittedCalibrator
    manifest: Manifest
    out: Path
    settings: ApplySettings
    device: torch.device

    def read(self, item: CaseToApply) -> CaseRead:
        start, case = time.perf_counter(), self.manifest.case(item.case_id)
        # Taken first: a file that changes while it is read then differs from its record, never the other way round.
        recipe = Recipe(
            calibrator_sha256=self.fitted.sha256,
            settings=self.settings,
            inputs=input_fingerprints(self.manifest, case),
        )
        if self.settings.pooling == "members-probabilities":
            members = CalibratedMembers(self.fitted, device=self.device)
            data = load_poolings(
                self.manifest,
                case,
                [Want(self.fitted.info.pooling)],
                device=self.device,
                with_labels=False,
                on_member=lambda _, member: members.add(member),
            )[0]
            return CaseRead(recipe, data, time.perf_counter() - start, members.mean())
        data = load_case(
            self.manifest, case, pooling=self.settings.pooling, device=self.device, with_labels=False, narrow=True
        )
        return CaseRead(recipe, data, time.perf_counter() - start)

    def finish(self, item: CaseToApply, data: CaseRead) -> CaseApplied:
        start, case = time.perf_counter(), data.data
        noticed = TellTales()
        noticed.look(case)
        grid = case.grid or Grid(space_of(case.logits))
        files = plan_files(item.case_id, grid, self.settings)
        regions = self.manifest.has_regions
        if data.mean is None:
            maps = calibrated_maps(self.fitted, case, self.settings, regions=regions)
        else:
            maps = member_maps(data.mean, case.decision, case.crop, self.settings, regions=regions)
        calibrated = time.perf_counter()
        outputs = write_case(self.out, files, maps, grid.affine)
        for name in item.stale:
            if name not in files.names:
                (self.out / name).unlink(missing_ok=True)
        written = time.perf_counter()
        seconds = {"read": data.seconds, "calibrate": calibrated - start, "write": written - calibrated}
        entry = CaseEntry(
            status="done",
            recipe=data.recipe,
            outputs=outputs,
            n_floored=case.n_floored,
            n_differing=maps.n_differing,
            warnings=tuple(noticed.warnings()),
            seconds={stage: round(value, 3) for stage, value in seconds.items()},
        )
        return CaseApplied(entry, noticed)
