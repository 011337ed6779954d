"""Jobs that look at cases and write no maps."""

from __future__ import annotations

from pathlib import Path

from segcal.applying.record import load_record
from segcal.manifest import Manifest
from segcal.service.requests import QaRequest
from segcal.service.work.context import JobFolder, WorkContext, stored_calibrator
from segcal.service.work.finishing import outcome_of
from segcal.service.work.looking import look
from segcal.service.work.outcome import Outcome
from segcal.service.work.paths import check_folder, load_manifest
from segcal.service.work.rows import case_rows


def run_qa_job(request: QaRequest, job: JobFolder, context: WorkContext) -> Outcome:
    """QA of a manifest, or of a folder that `segcal apply` wrote."""
    fitted = stored_calibrator(request.calibrator, context.files)
    source: Manifest | Path
    if request.manifest is not None:
        source = load_manifest(request.manifest, context.roots)
        known = [case.id for case in source.cases]
    else:
        assert request.folder is not None
        source = check_folder(request.folder, context.roots)
        record = load_record(source)
        known = [] if record is None else list(record.cases)  # a folder without one is refused by QA
    ids = known if request.cases is None else list(dict.fromkeys(request.cases))
    looked = look(source, fitted, job, context, numbered=ids, cases=ids)
    rows = case_rows(ids, request.calibrator, failed={}, result=looked)
    return outcome_of(
        rows, job, verb="looked at", calibrator=request.calibrator, method=fitted.info.method, looked=looked
    )
