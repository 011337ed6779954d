"""A pipeline: how members are pooled and what is done to the result. The rows of every table."""

from __future__ import annotations

from dataclasses import dataclass

from segcal.calibrator_info import CalibratorInfo
from segcal.calibrators import CALIBRATORS
from segcal.errors import UsageError
from segcal.fitted import FittedCalibrator
from segcal.manifest import Manifest
from segcal.regions import RegionCalibrator
from segcal.types import AppliedPooling, Pooling

SYMBOL: dict[Pooling, str] = {"logits": "z", "probabilities": "p"}


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """One way from member files to probabilities.

    Attributes:
        name: as tables show it: `cms_ap(z)`, `uncalibrated(p)`, `p0`.
        fitted: the calibrator; identity for the uncalibrated ones.
        n_members: how many members are pooled, None for all.
        each_member: members are calibrated one by one and their probabilities averaged.
    """

    name: str
    fitted: FittedCalibrator
    n_members: int | None = None
    each_member: bool = False

    @property
    def method(self) -> str:
        return self.fitted.info.method

    @property
    def pooling(self) -> Pooling:
        return self.fitted.info.pooling

    @property
    def applied(self) -> AppliedPooling:
        """How the calibrator is applied, as `segcal apply --pooling` names it."""
        return "members-probabilities" if self.each_member else self.pooling

    @property
    def calibrated(self) -> bool:
        return self.method != "identity"

    @property
    def can_flip(self) -> bool:
        """Whether a flip rate means anything: preserving and uncalibrated pipelines never flip."""
        return self.each_member or self.fitted.info.preserves is None


def pipeline_name(method: str, pooling: Pooling, n_members: int | None = None) -> str:
    """`cms_ap(z)`, or `cms_ap(z) M=3` on the first three members."""
    name = f"{'uncalibrated' if method == 'identity' else method}({SYMBOL[pooling]})"
    return name if n_members is None else f"{name} M={n_members}"


def calibrated_pipeline(fitted: FittedCalibrator, *, name: str | None = None, n_members: int | None = None) -> Pipeline:
    """The pipeline of a fitted calibrator."""
    info = fitted.info
    return Pipeline(name or pipeline_name(info.method, info.pooling, n_members), fitted, n_members)


def member_pipeline(pipeline: Pipeline) -> Pipeline:
    """The same calibrator on each member, then averaged: `cms_ap(members)`."""
    usual = pipeline_name(pipeline.method, pipeline.pooling)
    name = f"{pipeline.method}(members)" if pipeline.name == usual else f"{pipeline.name}(members)"
    return Pipeline(name, pipeline.fitted, each_member=True)


def baselines(manifest: Manifest) -> list[Pipeline]:
    """The uncalibrated ones: the first member alone, mean probabilities, mean logits."""
    single = Pipeline("p0", uncalibrated(manifest, "logits"), 1)
    pooled: tuple[Pooling, ...] = ("probabilities", "logits")
    ensembles = [calibrated_pipeline(uncalibrated(manifest, pooling)) for pooling in pooled]
    return [single, *ensembles] if manifest.n_members > 1 else ensembles[1:]


def uncalibrated(manifest: Manifest, pooling: Pooling) -> FittedCalibrator:
    """The identity as a fitted calibrator of these data."""
    identity = CALIBRATORS["identity"].identity(manifest.n_classes)
    info = CalibratorInfo(
        method="identity",
        classes=manifest.class_names,
        regions=manifest.has_regions,
        pooling=pooling,
        kind=manifest.kind,
        translation_invariant=True,
        preserves="order",
    )
    channels = RegionCalibrator((identity,) * manifest.n_classes)
    return FittedCalibrator(channels if manifest.has_regions else identity, info)


def check_names(pipelines: list[Pipeline]) -> None:
    """Two pipelines of one name could not be told apart in any table."""
    seen: set[str] = set()
    for pipeline in pipelines:
        if pipeline.name in seen:
            raise UsageError(
                f"two calibrators are both called {pipeline.name}; evaluate them in two calls, "
                "or give one of them a name: NAME=FILE"
            )
        seen.add(pipeline.name)
