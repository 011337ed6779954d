"""Settings of one pipeline: which method on which pooling, how it is solved, what is tuned and over which range.

The defaults are those of SEG App. B. Every pipeline has a commented file in `configs/`, which ships with the package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from segcal.settings_file import Number, SettingsModel, Whole, nearest_of, read_settings, shipped_files
from segcal.types import Pooling

STUDY_PREFIX = "study_"
"""Files of studies lie beside those of pipelines."""

QA_FILE = "qa.yaml"
"""So do the thresholds of QA."""


def _known_method(method: str) -> str:
    from segcal.calibrators import CALIBRATORS  # here, because it brings torch and settings are also read without

    if method not in CALIBRATORS:
        raise ValueError(f"unknown method `{method}`{nearest_of(method, CALIBRATORS)}")
    return method


MethodName = Annotated[str, AfterValidator(_known_method)]
"""Registry key of a calibrator."""


class LogRange(SettingsModel):
    """A hyper-parameter that is tuned: exactly zero (if `zero`) or log-uniform between `low` and `high`."""

    zero: bool = False
    low: Annotated[Number, Field(gt=0)]
    high: Annotated[Number, Field(gt=0)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low ({self.low:g}) is above high ({self.high:g})")
        return self


class Choices(SettingsModel):
    """A hyper-parameter that is tuned over a short list."""

    choices: Annotated[tuple[Annotated[Whole, Field(gt=0)], ...], Field(min_length=1)]


class SearchSpace(SettingsModel):
    """What tuning may try. Methods use what they have: λ and µ the matrix families, α local temperature scaling,
    learning rate and patience the `adam` solver and local temperature scaling."""

    lambda_: LogRange = Field(default=LogRange(zero=True, low=1e-6, high=1e-1), alias="lambda")
    mu: LogRange = LogRange(zero=True, low=1e-6, high=1e-1)
    alpha: LogRange = LogRange(zero=True, low=1e-6, high=1e-2)
    learning_rate: LogRange = LogRange(low=1e-4, high=3e-2)
    patience: Choices = Choices(choices=(10, 20, 50))


class PipelineSettings(SettingsModel):
    """One pipeline, complete: the same settings, data and seed give the same calibrator.

    Attributes:
        method: registry key of the calibrator.
        pooling: mean of logits or mean of probabilities.
        solver: `exact` (convex solvers) or `adam` (the paper's protocol).
        trials: hyper-parameter settings that tuning tries.
        rows: voxels the data are condensed to before fitting.
        max_patches: in-plane patches kept for methods that look at neighbours.
        seed: decides samples, drawn splits and trials.
        lambda_: fixes λ instead of tuning it (`lambda` in files).
        mu: fixes µ instead of tuning it.
        space: the ranges of what is tuned.
    """

    method: MethodName
    pooling: Pooling = "logits"
    solver: Literal["exact", "adam"] = "exact"
    trials: Annotated[Whole, Field(ge=1)] = 20
    rows: Annotated[Whole, Field(ge=1_000)] = 120_000
    max_patches: Annotated[Whole, Field(ge=1)] = 8_192
    seed: Annotated[Whole, Field(ge=0)] = 0
    lambda_: Annotated[Number, Field(ge=0)] | None = Field(default=None, alias="lambda")
    mu: Annotated[Number, Field(ge=0)] | None = None
    space: SearchSpace = SearchSpace()

    @property
    def name(self) -> str:
        """The pipeline as tables name it: `cms_ap(z)` on pooled logits, `cms_ap(p)` on pooled probabilities."""
        return f"{self.method}({'z' if self.pooling == 'logits' else 'p'})"


def load_settings(name_or_path: str | Path) -> PipelineSettings:
    """The settings of one pipeline: shipped ones by name, or a YAML file."""
    return read_settings(name_or_path, PipelineSettings, {name: f"{name}.yaml" for name in config_names()})


def config_names() -> list[str]:
    """Names of all pipelines whose settings ship with the package."""
    others = (STUDY_PREFIX, QA_FILE)
    return [name.removesuffix(".yaml") for name in shipped_files() if not name.startswith(others)]
