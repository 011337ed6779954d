"""What routes share: parameters with their bounds, and the problems that any route may answer with."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Header, Path, Query
from pydantic import StringConstraints

from segcal.service.api.auth import Caller, allowed
from segcal.service.api.problems import (
    BAD_REQUEST,
    FORBIDDEN,
    INTERNAL,
    INVALID,
    NO_STORE,
    NOT_SIGNED_IN,
    TOO_LARGE,
    TOO_SLOW,
    WRONG_HOST,
    Kind,
    documented,
)
from segcal.service.model import SubmissionKey

_ALWAYS = (BAD_REQUEST, TOO_SLOW, TOO_LARGE, WRONG_HOST, INVALID, FORBIDDEN, INTERNAL, NO_STORE)

JobId = Annotated[str, Path(pattern=r"^[0-9a-f]{24}$", description="Id of a job.")]
CaseKey = Annotated[int, Path(ge=1, le=2**31 - 1, description="Number of a case.")]
Hash = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of a calibrator's file.")]

Text = Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""One line of text; what no database or log stumbles over."""

Limit = Annotated[int, Query(ge=1, le=500, description="How many at most.")]

Submitter = Annotated[Caller, Depends(allowed("submit"))]
Admin = Annotated[Caller, Depends(allowed("admin"))]


def submission_key(
    caller: Submitter,
    text: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            pattern=r"^[\x21-\x7e]{1,200}$",
            description="A name of your own for this submission: sent again with the same one, it gives the same job.",
        ),
    ] = None,
) -> SubmissionKey | None:
    """A dependency: the key of a submission, if it has one."""
    return None if text is None else SubmissionKey(caller.id, text)


Key = Annotated[SubmissionKey | None, Depends(submission_key)]


def everywhere(*kinds: Kind, open_to_all: bool = False) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route: these problems and those every route may answer with."""
    signing_in = () if open_to_all else (NOT_SIGNED_IN,)
    return documented(*_ALWAYS, *signing_in, *kinds)
