"""Cases a calibrator was fitted on: numbers on them flatter it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from segcal.counted import count
from segcal.evaluation.measure import MeasuredCase
from segcal.evaluation.pipelines import Pipeline
from segcal.manifest import Manifest

_SAME, _TELLING = 1e-9, 1e-4
"""Two free energies this close, relatively, are of one case; those of pooled probabilities are all next to 0."""


def seen_in_fit(pipelines: Sequence[Pipeline], measured: Sequence[MeasuredCase], whole: Manifest | None) -> list[str]:
    """Warnings about pipelines that were fitted on what was measured.

    Args:
        pipelines: those with a calibrator.
        measured: the cases.
        whole: the manifest, if all its labelled cases or those of a fit were wanted.
    """
    learned = [p for p in pipelines if p.fitted.info.method != "identity"]
    here = [p for p in learned if whole is not None and p.fitted.info.manifest_sha256 == whole.sha256]
    return [*_of_this_manifest(here), *_calibration_cases_met([p for p in learned if p not in here], measured)]


def _of_this_manifest(pipelines: Sequence[Pipeline]) -> list[str]:
    if not pipelines:
        return []
    return [
        f"{', '.join(p.name for p in pipelines)}: fitted on this manifest, and its calibration or validation cases are "
        "among those measured: the numbers are too good. Use `--split K --subset test`, other cases, or `segcal study`"
    ]


def _calibration_cases_met(pipelines: Iterable[Pipeline], measured: Sequence[MeasuredCase]) -> list[str]:
    """A case with the very free energy of a calibration case is that case, whatever a manifest calls it."""
    met: dict[tuple[str, ...], list[str]] = {}
    for pipeline in pipelines:
        known = pipeline.fitted.info.reference_statistics.get("free_energy_mean", ())
        seen = tuple(one.case_id for one in measured if _is_among(known, one.energy, pipeline.pooling))
        if seen:
            met.setdefault(seen, []).append(pipeline.name)
    return [
        f"{', '.join(names)}: fitted on {count(len(cases), 'case')} of those measured ({', '.join(cases[:3])}"
        f"{', …' if len(cases) > 3 else ''}), known by the free energy: the numbers are too good. Measure cases that "
        "were not calibration cases, or use `segcal study`"
        for cases, names in met.items()
    ]


def _is_among(known: Sequence[float], energy: Mapping[str, Mapping[str, float]], pooling: str) -> bool:
    value = energy.get(pooling, {}).get("free_energy_mean", 0.0)
    return abs(value) > _TELLING and any(abs(value - other) <= _SAME * abs(value) for other in known)
