"""Jobs that fit calibrators; the supervisor takes the files into the store when the job is done."""

from __future__ import annotations

from segcal.fitted import FittedCalibrator
from segcal.fitting.run import fit_many
from segcal.service.requests import FitRequest
from segcal.service.work.context import JobFolder, WorkContext, fresh
from segcal.service.work.outcome import Outcome
from segcal.service.work.paths import load_manifest


def run_fit(request: FitRequest, job: JobFolder, context: WorkContext) -> Outcome:
    """Fit the methods from one read of the labelled cases."""
    fitted = fit_many(
        load_manifest(request.manifest, context.roots),
        request.methods,
        pooling=request.pooling,
        split=request.split,
        trials=request.trials,
        seed=request.seed,
        device=context.device,
        progress=context.progress,
        case_map=context.case_map,
    )
    fresh(job.out)
    files = {method: f"out/{method}.safetensors" for method in fitted}
    for method, one in fitted.items():
        one.save(job.path / files[method])
    result = {
        "calibrators": [_described(one, files[method]) for method, one in fitted.items()],
        "files": list(files.values()),
    }
    return Outcome(f"fitted {', '.join(fitted)}", result, calibrators=tuple(files.values()))


def _described(fitted: FittedCalibrator, file: str) -> dict[str, object]:
    info = fitted.info
    return {
        "method": info.method,
        "sha256": fitted.sha256,
        "file": file,
        "fit_nll": info.fit_nll,
        "validation_nll": info.validation_nll,
        "preserves": info.preserves,
        "warnings": list(info.warnings),
    }
