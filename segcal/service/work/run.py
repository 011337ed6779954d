"""`run_job`: one job from its request to its outcome, in a process that knows no database.

A job may be begun several times, because a worker died, and ends with the same files and the same outcome each time:
applying and studies go on where they stopped, everything else is done again.
"""

from __future__ import annotations

from segcal.errors import Interrupted, SegcalError
from segcal.io.atomic import remove_unfinished
from segcal.service.files import JOB_FOLDERS
from segcal.service.requests import (
    ApplyRequest,
    CaseRequest,
    EvaluateRequest,
    FitRequest,
    JobRequest,
    QaRequest,
    StudyRequest,
)
from segcal.service.work.applying import run_apply
from segcal.service.work.context import JobFolder, WorkContext
from segcal.service.work.evaluating import run_evaluate, run_study
from segcal.service.work.fit_job import run_fit
from segcal.service.work.one_case import run_case
from segcal.service.work.outcome import Outcome
from segcal.service.work.qa_job import run_qa_job

__all__ = ["Outcome", "WorkContext", "run_job"]


def run_job(job_id: str, request: JobRequest, context: WorkContext) -> Outcome:
    """Do a job in its folder.

    The caller has the folder to itself. Files appear whole or not at all; what an attempt that was killed left
    unfinished is removed.

    Raises:
        SegcalError: the job cannot be done; the message is for the user and names no folder of the service.
        Interrupted: Ctrl-C or SIGTERM turned into KeyboardInterrupt; the job can be taken up again.
    """
    job = JobFolder.of(job_id, context.files, request)
    job.path.mkdir(parents=True, exist_ok=True)
    remove_unfinished(job.path, JOB_FOLDERS)
    try:
        return _done(request, job, context)
    except KeyboardInterrupt:
        raise Interrupted("stopped; the job can be taken up again") from None
    except SegcalError as error:
        error.args = (job.said(str(error)),)
        raise


def _done(request: JobRequest, job: JobFolder, context: WorkContext) -> Outcome:
    match request:
        case ApplyRequest():
            return run_apply(request, job, context)
        case QaRequest():
            return run_qa_job(request, job, context)
        case EvaluateRequest():
            return run_evaluate(request, job, context)
        case FitRequest():
            return run_fit(request, job, context)
        case StudyRequest():
            return run_study(request, job, context)
        case CaseRequest():
            return run_case(request, job, context)
