"""How well does the expected DSC predict the true one, before and after calibration?

    python benchmarks/qa_hippocampus.py MANIFEST [--method ts --method cms_ap] [--calibrators DIR]

For every given split of the manifest the methods are fitted on its calibration cases (or read from
`DIR/<split>/<method>.safetensors`), and QA is run on its test cases without their labels. Then the labels are read and
the table is printed: bias and RMSE of the expected against the true mean foreground DSC, and Spearman's rank
correlation with it, for the expected DSC and for the other numbers QA gives. Intervals: 95 %, percentile bootstrap of
cases taken jointly over the splits, since a case can be a test case of several; correlations are computed within each
split and averaged.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr

from segcal.calibrator_info import CalibratorInfo
from segcal.calibrators import CALIBRATORS
from segcal.cases import load_case
from segcal.fit import fit_many
from segcal.fitted import FittedCalibrator, load_calibrator
from segcal.manifest import Manifest
from segcal.metrics.base import Undefined
from segcal.qa.case import QaCase, measure
from segcal.qa.ensemble import Ensemble
from segcal.qa.settings import QaSettings

CPU = torch.device("cpu")
UNCALIBRATED = "uncalibrated"
Rows = list[tuple[int, str, str, dict[str, float]]]  # split, case, pipeline, numbers


def uncalibrated(manifest: Manifest) -> FittedCalibrator:
    """The pooled probabilities as they are."""
    info = CalibratorInfo(
        method="identity",
        classes=tuple(manifest.class_names),
        pooling="logits",
        kind=manifest.kind,
        translation_invariant=True,
        preserves="order",
    )
    return FittedCalibrator(CALIBRATORS["identity"].identity(manifest.n_classes), info)


def true_dsc(manifest: Manifest, case_id: str) -> list[float]:
    """Dice of the pooled decision for each foreground class; NaN for a class in neither map."""
    data = load_case(manifest, manifest.case(case_id), pooling="logits", device=CPU, with_labels=True)
    assert data.labels is not None
    scores = []
    for c in range(1, manifest.n_classes):
        seg, truth = data.decision == c, data.labels == c
        total = int(seg.sum()) + int(truth.sum())
        scores.append(2.0 * int((seg & truth).sum()) / total if total else np.nan)
    return scores


def numbers(case: QaCase) -> dict[str, float]:
    """What QA says about a case, NaN where undefined."""
    found = {
        "expected DSC": case.expected_dsc,
        "boundary confidence": case.boundary_confidence,
        "member Dice": case.member_dice,
        "- member disagreement": case.disagreement if isinstance(case.disagreement, Undefined) else -case.disagreement,
    }
    for each in case.classes:
        found[f"expected DSC {each.name}"] = each.sums.expected_dsc
        found[f"volume gap {each.name}"] = each.sums.volume_gap
        if each.spread is not None:
            found[f"volume variation {each.name}"] = each.spread.variation
    for name, score in case.outlyingness.items():
        found[f"z {name}"] = score
    return {name: np.nan if isinstance(score, Undefined) else float(score) for name, score in found.items()}


def collect(manifest: Manifest, methods: list[str], folder: Path | None) -> Rows:
    """QA of every test case under every pipeline, with the true DSC beside it."""
    rows: Rows = []
    truth: dict[str, list[float]] = {}
    for k, split in enumerate(manifest.splits or ()):
        if folder is None:
            fitted = dict(fit_many(manifest, methods, split=k))
        else:
            fitted = {method: load_calibrator(folder / str(k) / f"{method}.safetensors") for method in methods}
        for name, calibrator in {UNCALIBRATED: uncalibrated(manifest), **fitted}.items():
            source = Ensemble(manifest, calibrator, device=CPU, cases=split.test)
            for case_id in source.ids:
                case = measure(source.load(case_id), source.names, QaSettings(), source.reference)
                each = truth.setdefault(case_id, true_dsc(manifest, case_id))
                found = numbers(case) | {f"true DSC {c.name}": d for c, d in zip(case.classes, each, strict=True)}
                rows.append((k, case_id, name, found | {"true DSC": float(np.nanmean(each))}))
    return rows


class Bootstrap:
    """Replicates of case weights, the same for every pipeline and number."""

    def __init__(self, ids: list[str], n_replicates: int, seed: int) -> None:
        self.ids = sorted(set(ids))
        drawn = np.random.default_rng(seed).integers(0, len(self.ids), (n_replicates, len(self.ids)))
        self.weights = np.stack([np.bincount(row, minlength=len(self.ids)) for row in drawn])

    def interval(self, ids: list[str], statistic: Callable[[NDArray[np.int64]], float]) -> str:
        """`value [low, high]`; `statistic` takes row indexes, repeated as drawn."""
        position = np.array([self.ids.index(case_id) for case_id in ids])
        everything = np.arange(len(ids))
        values = [statistic(np.repeat(everything, weights[position])) for weights in self.weights]
        low, high = np.nanpercentile(values, [2.5, 97.5])
        return f"{statistic(everything):+.3f} [{low:+.3f}, {high:+.3f}]"


def rank_correlation(x: NDArray[np.float64], y: NDArray[np.float64], split: NDArray[np.int64]) -> float:
    """Spearman's rho within each split, averaged; NaN where a split has no variation."""
    values = []
    for k in np.unique(split):
        a, b = x[split == k], y[split == k]
        kept = np.isfinite(a) & np.isfinite(b)
        varies = kept.sum() > 2 and np.ptp(a[kept]) > 0 and np.ptp(b[kept]) > 0
        values.append(float(spearmanr(a[kept], b[kept]).statistic) if varies else np.nan)
    return float(np.nanmean(values)) if np.isfinite(values).any() else np.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--method", action="append", default=None)
    parser.add_argument("--calibrators", type=Path, default=None)
    parser.add_argument("--replicates", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    manifest = Manifest.load(options.manifest)
    rows = collect(manifest, options.method or ["ts", "cms_ap"], options.calibrators)
    bootstrap = Bootstrap([case_id for _, case_id, _, _ in rows], options.replicates, options.seed)
    print_tables(rows, bootstrap)


def print_tables(rows: Rows, bootstrap: Bootstrap) -> None:
    """Agreement with the true DSC, then every number as a predictor, then its distribution."""
    print(f"{'pipeline':14}{'of':22}{'bias':>26}{'RMSE':>26}{'Spearman':>26}")
    for pipeline in dict.fromkeys(row[2] for row in rows):
        chosen = [row for row in rows if row[2] == pipeline]
        ids, split = [row[1] for row in chosen], np.array([row[0] for row in chosen])
        table = {name: np.array([row[3][name] for row in chosen]) for name in chosen[0][3]}
        for name in [name for name in table if name.startswith("expected DSC")]:
            expected, truth = table[name], table[name.replace("expected", "true")]
            error = expected - truth
            cells = [
                bootstrap.interval(ids, lambda i, e=error: float(np.nanmean(e[i]))),
                bootstrap.interval(ids, lambda i, e=error: float(np.sqrt(np.nanmean(e[i] ** 2)))),
                bootstrap.interval(ids, lambda i, x=expected, y=truth: rank_correlation(x[i], y[i], split[i])),
            ]
            print(f"{pipeline:14}{name.removeprefix('expected '):22}" + "".join(f"{cell:>26}" for cell in cells))
        for name, values in table.items():
            if name.startswith(("expected DSC", "true")) or not np.isfinite(values).any():
                continue
            truth = table["true DSC"]
            cell = bootstrap.interval(ids, lambda i, x=values, y=truth: rank_correlation(x[i], y[i], split[i]))
            print(f"{pipeline:14}{name:48}{'':26}{cell:>26}")
        for name, values in table.items():
            if np.isfinite(values).any():
                ends = np.nanpercentile(values, [0, 5, 50, 95, 100])
                print(f"{pipeline:14}  {name:34} 0/5/50/95/100 %: " + " ".join(f"{v:9.4f}" for v in ends))


if __name__ == "__main__":
    main()
