"""Settings of a study: which pipelines, how many repeats, which sensitivities. Shipped as `paper` and `quick`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from segcal.settings import STUDY_PREFIX, MethodName
from segcal.settings_file import SettingsModel, Whole, read_settings, shipped_files
from segcal.types import Pooling


class StudyPipeline(SettingsModel):
    """One row of the study's table."""

    method: MethodName
    pooling: Pooling


class StudySettings(SettingsModel):
    """A study, complete: the same settings, data and seed give the same tables.

    Attributes:
        pipelines: fitted in every repeat; the uncalibrated ones are always in the table.
        repeats: random partitions, when the manifest gives no splits.
        calibration, validation, test: cases in each; None takes 50 % / 20 % / the rest.
        trials: settings tried when tuning a pipeline.
        rows: voxels the data are condensed to.
        max_patches: patches for local temperature scaling.
        seed: decides partitions, samples, trials and resamples.
        replicates: of the bootstrap.
        member_counts: ensemble sizes for the sensitivity to M, smaller than the number of members.
        calibration_sizes: numbers of calibration cases for the sensitivity to n.
        sensitivity_methods: pipelines (on pooled logits) that the sensitivities are computed for.
        bins: further bin counts for the sensitivity of ECE and ACE to B.
        include_background: count class 0 in the mean Dice.
    """

    pipelines: tuple[StudyPipeline, ...]
    repeats: Annotated[Whole, Field(ge=1)] = 3
    calibration: Annotated[Whole, Field(ge=1)] | None = None
    validation: Annotated[Whole, Field(ge=1)] | None = None
    test: Annotated[Whole, Field(ge=1)] | None = None
    trials: Annotated[Whole, Field(ge=1)] = 20
    rows: Annotated[Whole, Field(ge=1_000)] = 120_000
    max_patches: Annotated[Whole, Field(ge=1)] = 8192
    seed: Annotated[Whole, Field(ge=0)] = 0
    replicates: Annotated[Whole, Field(ge=1)] = 2000
    member_counts: tuple[Annotated[Whole, Field(ge=1)], ...] = ()
    calibration_sizes: tuple[Annotated[Whole, Field(ge=1)], ...] = ()
    sensitivity_methods: tuple[MethodName, ...] = ("ts", "ms", "ms_c", "cdc", "cms_ap")
    bins: tuple[Annotated[Whole, Field(ge=1)], ...] = ()
    include_background: bool = False

    @model_validator(mode="after")
    def _no_doubles(self) -> Self:
        seen = [(p.method, p.pooling) for p in self.pipelines]
        if not seen:
            raise ValueError("a study needs at least one pipeline")
        if len(set(seen)) < len(seen):
            raise ValueError("a pipeline stands twice in the list")
        return self


def load_study_settings(name_or_path: str | Path) -> StudySettings:
    """Settings that ship with the package (`paper`, `quick`) or a YAML file of your own."""
    names = [name for name in shipped_files() if name.startswith(STUDY_PREFIX)]
    known = {name.removeprefix(STUDY_PREFIX).removesuffix(".yaml"): name for name in names}
    return read_settings(name_or_path, StudySettings, known)
