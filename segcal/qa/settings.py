"""Thresholds of QA: which numbers make a case worth a look. Shipped as `qa`, with a comment for each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from segcal.settings import QA_FILE
from segcal.settings_file import Number, SettingsModel, Whole, read_settings

Share = Annotated[Number, Field(ge=0, le=1)] | None
NotNegative = Annotated[Number, Field(ge=0)] | None


class QaSettings(SettingsModel):
    """When a case is flagged; a threshold of null switches its flag off.

    Attributes:
        min_expected_dsc: mean expected DSC over the foreground below this.
        min_class_expected_dsc: expected DSC of any one class below this.
        max_volume_gap: |expected - segmented volume| / segmented volume of any class above this.
        missed_class_voxels: expected volume, in voxels, of a class that is segmented nowhere above this.
        min_boundary_confidence: mean confidence near the predicted boundary below this.
        max_disagreement: mean pairwise disagreement of the members near the predicted boundary above this.
        min_member_dice: agreement of the members' segmentations (mean over classes) below this.
        max_volume_variation: standard deviation over mean of the members' expected volumes of any class above this.
        max_outlyingness: absolute robust z-score against the calibration cases above this.
        boundary_voxels: voxels closer to the boundary than this are near it.
        min_reference_cases: fewer calibration cases than this give no z-score.
        max_pictures: cases with a picture in the page, flagged ones first.
    """

    min_expected_dsc: Share = 0.80
    min_class_expected_dsc: Share = 0.75
    max_volume_gap: NotNegative = 0.15
    missed_class_voxels: NotNegative = 10.0
    min_boundary_confidence: Share = 0.92
    max_disagreement: Share = 0.09
    min_member_dice: Share = 0.80
    max_volume_variation: NotNegative = 0.12
    max_outlyingness: NotNegative = 3.5
    boundary_voxels: Annotated[Number, Field(gt=0)] = 3.0
    min_reference_cases: Annotated[Whole, Field(ge=3)] = 5
    max_pictures: Annotated[Whole, Field(ge=0)] = 60


def load_qa_settings(name_or_path: str | Path = "qa") -> QaSettings:
    """The shipped thresholds (`qa`), or those of a YAML file."""
    return read_settings(name_or_path, QaSettings, {QA_FILE.removesuffix(".yaml"): QA_FILE})
