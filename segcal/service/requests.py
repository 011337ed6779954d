"""What a job is asked to do: one checked model a kind, the same in the API, in the store and in the worker."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, model_validator

from segcal.types import Pooling

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
AbsolutePath = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^/[^\x00]*$")]
CaseName = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$")]
BatchName = Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00-\x1f]*$")]
MethodName = Annotated[str, StringConstraints(min_length=1, max_length=40, pattern=r"^[a-z0-9_]+$")]
Cases = Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=200)]], Field(max_length=100_000)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    batch: BatchName = Field(default="", description="What the cases are grouped under; the manifest's name if empty.")


class ApplyRequest(_Request):
    """Calibrated maps, and QA of them, for a manifest or for a folder of nnU-Net outputs with saved probabilities."""

    kind: Literal["apply"] = "apply"
    calibrator: Sha256
    manifest: AbsolutePath | None = None
    folder: AbsolutePath | None = None
    cases: Cases | None = None
    format: Literal["nnunet", "nifti"] = "nnunet"
    dtype: Literal["float32", "float16", "uint16"] = "float32"
    qa: bool = Field(default=True, description="Also look at every case and make its layers for the page.")

    @model_validator(mode="after")
    def _one_source(self) -> ApplyRequest:
        if (self.manifest is None) == (self.folder is None):
            raise ValueError("give either a manifest or a folder")
        if self.folder is not None and (self.cases is not None or self.format != "nnunet"):
            raise ValueError("`cases` and `format` belong to a manifest; a folder is copied whole, as nnU-Net wrote it")
        return self


class QaRequest(_Request):
    """QA without writing maps: of a manifest, or of a folder written by `segcal apply`."""

    kind: Literal["qa"] = "qa"
    calibrator: Sha256
    manifest: AbsolutePath | None = None
    folder: AbsolutePath | None = None
    cases: Cases | None = None

    @model_validator(mode="after")
    def _one_source(self) -> QaRequest:
        if (self.manifest is None) == (self.folder is None):
            raise ValueError("give either a manifest or a folder")
        return self


class EvaluateRequest(_Request):
    """Measure calibrators on labelled cases, with intervals and a report."""

    kind: Literal["evaluate"] = "evaluate"
    manifest: AbsolutePath
    calibrators: Annotated[list[Sha256], Field(min_length=1, max_length=50)]
    split: Annotated[int, Field(ge=0, le=10_000)] | None = None
    subset: Literal["calibration", "validation", "test"] | None = None


class FitRequest(_Request):
    """Fit calibrators; they are in the store when the job is done."""

    kind: Literal["fit"] = "fit"
    manifest: AbsolutePath
    methods: Annotated[list[MethodName], Field(min_length=1, max_length=20)] = ["cms_ap"]
    pooling: Pooling = "logits"
    split: Annotated[int, Field(ge=0, le=10_000)] | None = None
    trials: Annotated[int, Field(ge=1, le=1000)] = 20
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0


class StudyRequest(_Request):
    """Pipelines x repeats, the paper's table."""

    kind: Literal["study"] = "study"
    manifest: AbsolutePath
    config: Literal["paper", "quick"] = "quick"


class CaseRequest(_Request):
    """One nnU-Net output. Made by the service itself, for an upload or for a watched folder; not part of the API.

    Attributes:
        source: the folder that holds `<case>.npz` and what belongs to it; None for what was uploaded to `in/`.
        files: with `source`: names of the files.
        fingerprint: of the watched files when they were found complete, or of the upload.
    """

    kind: Literal["case"] = "case"
    calibrator: Sha256
    case: CaseName
    source: AbsolutePath | None = None
    files: tuple[str, ...] = ()
    fingerprint: str = ""


Submittable: TypeAlias = Annotated[
    ApplyRequest | QaRequest | EvaluateRequest | FitRequest | StudyRequest, Field(discriminator="kind")
]
"""What a user may ask for."""

JobRequest: TypeAlias = ApplyRequest | QaRequest | EvaluateRequest | FitRequest | StudyRequest | CaseRequest

_ANY: TypeAdapter[JobRequest] = TypeAdapter(Annotated[JobRequest, Field(discriminator="kind")])


def read_request(values: Any) -> JobRequest:
    """The request of a job in the store."""
    return _ANY.validate_python(values)
