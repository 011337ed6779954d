"""The parts a manifest is made of: cases, regions, splits and how the predictions were made."""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

SUBSETS = ("calibration", "validation", "test")


class ManifestPart(BaseModel):
    """Frozen, and closed: a key nobody knows is an error, because a misspelt option must not vanish."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)


def _relative_path(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError("an empty path; name a file or leave the key out")
    if PurePosixPath(text).is_absolute() or PureWindowsPath(text).drive or text.startswith(("~", "\\")):
        raise ValueError(
            f"{text!r} is an absolute path; paths are relative to the manifest's folder, so that data and manifest "
            "can move together. Write it relative (`../` may lead upwards) or put the manifest beside the data"
        )
    return PurePosixPath(text).as_posix()


def _some_members(members: tuple[str, ...]) -> tuple[str, ...]:
    if not members:
        raise ValueError("the list is empty; name at least one member file")
    return members


def _plain_name(text: str) -> str:
    if not text or text != text.strip():
        raise ValueError(f"{text!r} is empty or has blanks at its ends; give it a name")
    if not text.isprintable():
        raise ValueError(f"{text!r} contains line breaks or control characters; use printable text")
    return text


def _case_id(text: str) -> str:
    _plain_name(text)
    if text.startswith(".") or any(sign in text for sign in '/\\:*?"<>|'):
        raise ValueError(
            f'{text!r} cannot be a case id: output files are named after it, so it must not start with "." '
            'or contain / \\ : * ? " < > |'
        )
    return text


Bounds = tuple[Annotated[StrictInt, Field(ge=0)], Annotated[StrictInt, Field(ge=1)]]
RelativePath = Annotated[StrictStr, AfterValidator(_relative_path)]
Name = Annotated[StrictStr, AfterValidator(_plain_name)]
CaseId = Annotated[StrictStr, AfterValidator(_case_id)]


class ManifestCase(ManifestPart):
    """One image with the files of its ensemble members.

    Attributes:
        id: Name of the case; output files carry it.
        members: One file per ensemble member, in the same order in every case.
        label: Ground truth; needed to fit and to evaluate.
        image: The image itself, only for pictures.
        group: Stratum for reports, such as a site.
        subject: Cases of one subject are never torn apart by splits and resampling.
        deployed: The segmentation in use; flips are then also counted against it.
        crop: [low, high) per axis, in the order of the member's array: where the network predicted, for members that
            do not say it themselves. nnU-Net keeps it in a pickle; `segcal nnunet collect` brings it here.
    """

    id: CaseId
    members: Annotated[tuple[RelativePath, ...], AfterValidator(_some_members)]
    label: RelativePath | None = None
    image: RelativePath | None = None
    group: Name | None = None
    subject: Name | None = None
    deployed: RelativePath | None = None
    crop: Annotated[tuple[Bounds, ...], Field(min_length=2, max_length=3)] | None = None

    @property
    def subject_key(self) -> str:
        """What stays together in splits and resampling: the subject, or the case itself when none is named."""
        return f"case:{self.id}" if self.subject is None else f"subject:{self.subject}"


class Region(ManifestPart):
    """One channel of a region-based (sigmoid) model and the label values it stands for."""

    name: Name
    labels: Annotated[tuple[Annotated[StrictInt, Field(ge=0)], ...], Field(min_length=1)]


class Split(ManifestPart):
    """Case ids of one partition; a subset that is not needed stays empty."""

    calibration: tuple[CaseId, ...] = ()
    validation: tuple[CaseId, ...] = ()
    test: tuple[CaseId, ...] = ()

    def subset(self, name: str) -> tuple[str, ...]:
        """Ids of `calibration`, `validation` or `test`."""
        ids: tuple[str, ...] = getattr(self, name)
        return ids


class PredictionInfo(ManifestPart):
    """How nnU-Net made the members; copied into the calibrator and compared when it is applied."""

    mirroring: StrictBool | None = None
    step_size: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    folds: tuple[StrictInt | Literal["all"], ...] | None = None
