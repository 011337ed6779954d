"""Results folders with known answers, written through the project's own records and summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.calibrator_info import CalibratorInfo
from segcal.calibrators import CALIBRATORS
from segcal.evaluation.picture_maps import PictureMaps
from segcal.evaluation.pictures import CasePicture
from segcal.evaluation.pipelines import Pipeline
from segcal.evaluation.records import CaseRecord, Records
from segcal.evaluation.run import save_pictures, save_summary
from segcal.evaluation.summary import BootstrapSettings, summarise
from segcal.fitted import FittedCalibrator
from segcal.metrics import MetricSettings
from segcal.report.results import Results, load_results

BASE = {"nll": 0.05, "brier": 0.02, "ece": 0.010, "ba_ece": 0.030, "dsc": 0.85}


@dataclass(frozen=True)
class Fake:
    """One pipeline: what it adds to the base numbers of every case, and how overconfident its tables are.

    Attributes:
        shift: column -> mean change, for example {"nll": -0.01}.
        spread: how much the change swings between even and odd cases, as a share of the base number.
        gap: confidence minus accuracy in every bin.
        band_gaps: the same by distance band, instead.
    """

    name: str
    method: str = "ts"
    pooling: str = "logits"
    shift: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0
    gap: float = 0.05
    band_gaps: tuple[float, ...] | None = None
    flip: float = 0.0
    n_members: int | None = None
    warnings: tuple[str, ...] = ()

    def pipeline(self, classes: Sequence[str], regions: bool) -> Pipeline:
        kind = CALIBRATORS[self.method]
        info = CalibratorInfo(
            method=self.method,
            classes=tuple(classes),
            regions=regions,
            pooling=self.pooling,
            kind="logits",
            translation_invariant=kind.translation_invariant,
            preserves=kind.preserves,
            warnings=self.warnings,
        )
        return Pipeline(self.name, FittedCalibrator(kind.identity(len(classes)), info), self.n_members)


PLAIN = Fake("uncalibrated(z)", "identity", gap=0.08)
GOOD = {"nll": -0.01, "brier": -0.004, "ece": -0.005, "ba_ece": -0.012}
BAD = {column: -value for column, value in GOOD.items()}


def make_results(
    folder: Path,
    pipelines: Sequence[Fake],
    *,
    n_cases: int = 20,
    n_repeats: int = 1,
    classes: Sequence[str] = ("background", "liver", "tumour"),
    names: Sequence[str] | None = None,
    groups: Sequence[str] = (),
    n_pictures: int = 0,
    undefined: Sequence[str] = (),
    regions: bool = False,
    context: Mapping[str, Any] | None = None,
    replicates: int = 200,
) -> Results:
    """Write a results folder and read it back.

    Args:
        names: ids of the cases.
        groups: dealt out to the cases in turn.
        n_pictures: so many cases get a picture.
        undefined: ids of cases without NLL.
        context: entries of summary.json on top of the usual ones.
    """
    ids = list(names or [f"case_{k:03d}" for k in range(n_cases)])
    settings = MetricSettings(tuple(classes))
    rows = [
        _record(repeat, fake, k, case, groups[k % len(groups)] if groups else "", settings, undefined, regions)
        for repeat in range(n_repeats)
        for fake in pipelines
        for k, case in enumerate(ids)
    ]
    records = Records(tuple(rows))
    usual = {
        "run": "evaluate" if n_repeats == 1 else "study",
        "manifest": {"name": "phantom", "sha256": "ab" * 32, "kind": "logits"},
        "classes": list(classes),
        "regions": regions,
        "n_members": 5,
        "pictured": pipelines[-1].name,
        "free_energy": {
            case: {"logits": {"free_energy_mean": 5.0, "free_energy_std": 1.0 + k}} for k, case in enumerate(ids)
        },
        "outside_share": {},
        "n_floored": 0,
        "failed": {},
        "warnings": [],
        "versions": {"segcal": "0.1.0"},
    }
    built = [fake.pipeline(classes, regions) for fake in pipelines]
    how = BootstrapSettings(n_replicates=replicates)
    summary = summarise(records, built, settings, how, {**usual, **(context or {})})
    folder.mkdir(parents=True, exist_ok=True)
    records.save(folder)
    save_summary(summary, folder)
    save_pictures({case: make_picture(k, n_classes=len(classes)) for k, case in enumerate(ids[:n_pictures])}, folder)
    return load_results(folder)


def make_picture(seed: int, *, n_classes: int = 3, size: int = 24, flips: bool = False) -> CasePicture:
    """One noisy slice with every map."""
    rng = np.random.default_rng([seed, size])
    label = np.zeros((1, size, size), dtype=np.int16)
    label[:, size // 4 : 3 * size // 4, size // 4 : 3 * size // 4] = 1
    label[:, size // 3 : size // 2, size // 3 : size // 2] = min(2, n_classes - 1)
    segmentation = np.where(rng.random(label.shape) < 0.03, 0, label).astype(np.int16)
    before = np.clip(rng.normal(0.95, 0.1, label.shape), 0.3, 1).astype(np.float16)
    maps = PictureMaps(
        segmentation=segmentation,
        confidence_before=before,
        confidence_after=(before * 0.95).astype(np.float16),
        image=rng.normal(size=(1, *label.shape)).astype(np.float16),
        label=label,
        flips=rng.random(label.shape) < (0.02 if flips else 0),
        free_energy=rng.normal(size=label.shape).astype(np.float16),
    )
    return CasePicture(maps, index=3, n_slices=9, affine=np.diag([-1.0, -1.0, 2.0, 1.0]))


def _record(
    repeat: int,
    fake: Fake,
    k: int,
    case: str,
    group: str,
    settings: MetricSettings,
    undefined: Sequence[str],
    regions: bool,
) -> CaseRecord:
    """The hardness of a case is common to all pipelines; the swing is a pipeline's own and cancels over two cases."""
    hardness = 1 + 0.3 * np.random.default_rng([1, k]).normal()
    swing = fake.spread * (-1) ** k
    values = {c: base * hardness + fake.shift.get(c, 0.0) + swing * base for c, base in BASE.items()}
    values["dsc"] = BASE["dsc"] - 0.05 * hardness + fake.shift.get("dsc", 0.0) + swing * fake.flip
    values |= {f"dsc:{name}": values["dsc"] for name in settings.class_names}
    values |= {"n_voxels": 1e5, "n_floored": 0.0, "n_floored_outside": 0.0}
    shares = {"": fake.flip, "_harmful": 0.5 * fake.flip, "_beneficial": 0.3 * fake.flip, "_neutral": 0.2 * fake.flip}
    values |= {f"flip{part}": share for part, share in shares.items()}
    if case in undefined:
        values["nll"] = float("nan")
    return CaseRecord(repeat, fake.name, case, f"case:{case}", group, values, _tables(fake, k, settings, regions))


def _tables(fake: Fake, k: int, settings: MetricSettings, regions: bool) -> dict[str, NDArray[np.float64]]:
    """Tables in the shapes of real runs: a channel first, then band or class, then (count, confidence, hits) x bin."""
    n_classes = settings.n_classes
    channels = n_classes if regions else 1
    bands = fake.band_gaps or (fake.gap,) * len(settings.band_edges)
    noisy = fake.gap + 0.01 * (-1) ** (k + len(fake.name))
    confusion = (
        np.full((2, 2) if regions else (n_classes, n_classes), 100.0) + np.eye(2 if regions else n_classes) * 5000
    )
    inner = 2 if regions else n_classes
    one = {
        "top_label_50": _table(50, noisy),
        "top_label_15": _table(15, noisy),
        "top_label_bands_15": np.stack([_table(15, gap) for gap in bands]),
        "classwise_50": np.stack([_table(50, noisy)] * inner),
        "confusion": confusion,
    }
    return {name: np.stack([table] * channels) for name, table in one.items()}


def _table(n_bins: int, gap: float) -> NDArray[np.float64]:
    """(3, n_bins): 2000 voxels in every bin from 40 % on, accuracy = confidence - gap."""
    middle = (np.arange(n_bins) + 0.5) / n_bins
    counts = np.where(middle > 0.4, 2000.0, 0.0)
    return np.stack([counts, counts * middle, np.rint(counts * np.clip(middle - gap, 0, 1))])
