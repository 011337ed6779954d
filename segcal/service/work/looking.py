"""QA of a job's cases with everything the page needs of them: numbers, flags, layers, reliability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from segcal.errors import OutputError, SegcalError
from segcal.fitted import FittedCalibrator
from segcal.io.atomic import remove_unfinished
from segcal.manifest import Manifest
from segcal.qa.case import QaMaps
from segcal.qa.results import FlaggedCase, QaResult
from segcal.qa.run import run_qa
from segcal.service.work.context import JobFolder, WorkContext, fresh
from segcal.service.work.layers import CaseLayers
from segcal.service.work.reliability import reliability, with_labels
from segcal.threads import one_thread


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of a case besides its numbers.

    Attributes:
        view: folder of the layers, relative to the job's folder.
        reliability: tables before and after, if the case has a label.
        notes: what could not be shown or compared, and why.
    """

    view: str
    reliability: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KeepView:
    """Writes the layers of every case while QA has its maps in memory; see `run_qa`.

    Attributes:
        job: whose cases they are.
        numbers: the name of each case's folder; a case's own name could be anything.
        fitted: the calibrator.
        manifest: None for a folder of applied maps, which has neither labels nor logits.
    """

    job: JobFolder
    numbers: Mapping[str, int] = field(repr=False)
    fitted: FittedCalibrator
    manifest: Manifest | None

    def __call__(self, maps: QaMaps, flagged: FlaggedCase) -> Kept:
        folder = self.job.view / str(self.numbers[maps.case_id])
        layers = CaseLayers(folder, maps, self.fitted.info.classes)
        tables = None
        with one_thread():
            layers.add_image()
            layers.add_maps()
            if self._labelled(maps.case_id):
                tables = self._compare(maps, layers)
        layers.notes = [self.job.said(note) for note in layers.notes]
        layers.finish()
        return Kept(f"{self.job.view.name}/{folder.name}", tables, tuple(layers.notes))

    def _labelled(self, case_id: str) -> bool:
        return self.manifest is not None and self.manifest.case(case_id).label is not None

    def _compare(self, maps: QaMaps, layers: CaseLayers) -> dict[str, Any] | None:
        """With the label; one that cannot be read is no reason to give the case up."""
        assert self.manifest is not None
        assert maps.case is not None
        try:
            data = with_labels(self.manifest, maps.case)
            layers.add_label(data)
            return reliability(self.manifest, data, maps.probs, self.fitted.info.pooling).to_json()
        except OutputError:
            raise
        except SegcalError as error:
            layers.notes.append(f"not compared with its label: {error}")
            return None


def look(
    source: Manifest | Path,
    fitted: FittedCalibrator,
    job: JobFolder,
    context: WorkContext,
    *,
    numbered: Sequence[str],
    cases: Sequence[str],
) -> QaResult:
    """QA of some cases, begun anew: what an earlier attempt left is removed first.

    Args:
        source: a manifest, or a folder of applied maps.
        numbered: all cases of the job in order; the layers of the n-th lie in `view/n`.
        cases: those that can be looked at.
    """
    fresh(job.view)
    keep = KeepView(
        job,
        {case_id: number for number, case_id in enumerate(numbered)},
        fitted,
        source if isinstance(source, Manifest) else None,
    )
    result = run_qa(
        source,
        calibrator=fitted,
        cases=cases,
        device=context.device,
        progress=context.progress,
        case_map=context.case_map,
        keep=keep,
    )
    # What a machine of a cluster that was killed left half-written; its cases were looked at again elsewhere.
    remove_unfinished(job.path, [job.view.name])
    result = replace(result, failed=job.said_all(dict(result.failed)))
    result.save(fresh(job.qa))
    return result
