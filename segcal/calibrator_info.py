"""What a calibrator file says about itself: how it was made, for which data, with which caveats."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from segcal.errors import FileFormatError
from segcal.types import Kind, Pooling

FORMAT = "segcal-calibrator-1"


class CalibratorInfo(BaseModel):
    """The metadata of a calibrator, stored as one JSON object with sorted keys.

    Attributes:
        format: version of this file format.
        method: registry key.
        solver: "exact" or "adam".
        classes: names of the classes or regions, in channel order.
        regions: whether the channels are regions of a sigmoid model.
        pooling: how the members were pooled.
        kind: what the member files held.
        n_members: how many were pooled.
        translation_invariant: of the pipeline; any method on pooled probabilities is.
        preserves: "order", "argmax" or null.
        lambda_: off-diagonal penalty, null where the method has none (`lambda` in the file).
        mu: bias penalty, likewise.
        alpha: weight decay of local temperature scaling, likewise.
        region_values: region models: the hyper-parameters of every region, where they were tuned one by one.
        fit_nll: mean NLL over all calibration voxels, without penalties.
        validation_nll: the same over the validation voxels, null when there were none.
        manifest_sha256: of the manifest it was fitted on.
        prediction: how the members were predicted, from the manifest.
        reference_statistics: per calibration case, sorted by id: free energy and confidence, for QA.
        versions: of the software that made it.
        seed: of sampling, drawn split and tuning.
        warnings: what a user has to know.
        settings: only of classifiers (`segcal classify`): what the method was fitted with. Left out of other files.
        choice: only of `--method auto`: criterion, constraint, value and parameters of every candidate, the reason.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    format: Literal["segcal-calibrator-1"] = "segcal-calibrator-1"
    method: str
    solver: Literal["exact", "adam"] = "exact"
    classes: tuple[str, ...]
    regions: bool = False
    pooling: Pooling
    kind: Kind
    n_members: int | None = None
    translation_invariant: bool
    preserves: Literal["order", "argmax"] | None
    lambda_: float | None = Field(default=None, validation_alias="lambda", serialization_alias="lambda")
    mu: float | None = None
    alpha: float | None = None
    region_values: dict[str, dict[str, float]] | None = None
    fit_nll: float | None = None
    validation_nll: float | None = None
    manifest_sha256: str | None = None
    prediction: dict[str, Any] | None = None
    reference_statistics: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    seed: int = 0
    warnings: tuple[str, ...] = ()
    choice: dict[str, Any] | None = None
    settings: dict[str, Any] | None = None

    def to_json(self) -> str:
        """Canonical text: sorted keys, so that equal fits are equal bytes."""
        values = self.model_dump(mode="json", by_alias=True)
        if self.settings is None:
            del values["settings"]
        return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, source: str) -> CalibratorInfo:
        """Read the metadata; `source` names the file in errors."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:  # not JSON, or a whole number of thousands of digits
            raise FileFormatError(f"{source}: the calibrator's metadata is not readable as JSON ({error})") from None
        found = values.get("format") if isinstance(values, dict) else None
        if found != FORMAT:
            raise FileFormatError(
                f"{source}: calibrator format {found!r} is unknown here; this version of segcal reads {FORMAT!r}. "
                "Install the version that wrote it, or fit again."
            )
        try:
            info = cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise FileFormatError(f"{source}: metadata field `{where}`: {first['msg']}") from None
        try:
            info.to_json()
        except ValueError:  # Python reads NaN and 1e999, which no JSON may hold
            raise FileFormatError(
                f"{source}: the metadata hold a number that is not finite; the file was altered, fit again"
            ) from None
        return info
