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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from _results import entry, record
from numpy.typing import NDArray
from scipy.stats import rankdata

from segcal.calibrator_info import CalibratorInfo
from segcal.calibrators import CALIBRATORS
from segcal.cases import load_case
from segcal.fitted import FittedCalibrator, load_calibrator
from segcal.fitting.run import fit_many
from segcal.manifest import Manifest
from segcal.metrics.base import Undefined
from segcal.qa.case import QaCase, measure
from segcal.qa.ensemble import Ensemble
from segcal.qa.flags import case_flags
from segcal.qa.settings import load_qa_settings

CPU = torch.device("cpu")
UNCALIBRATED = "uncalibrated"
POOR = 0.8  # a true DSC below this should have been flagged
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
    settings = load_qa_settings()
    for k, split in enumerate(manifest.splits or ()):
        if folder is None:
            fitted = dict(fit_many(manifest, methods, split=k))
        else:
            fitted = {method: load_calibrator(folder / str(k) / f"{method}.safetensors") for method in methods}
        for name, calibrator in {UNCALIBRATED: uncalibrated(manifest), **fitted}.items():
            source = Ensemble(manifest, calibrator, device=CPU, cases=split.test)
            for case_id in source.ids:
                case = measure(source.load(case_id), source.names, settings, source.reference)
                each = truth.setdefault(case_id, true_dsc(manifest, case_id))
                found = numbers(case) | {f"true DSC {c.name}": d for c, d in zip(case.classes, each, strict=True)}
                found |= {"true DSC": float(np.nanmean(each)), "flags": float(len(case_flags(case, settings)))}
                rows.append((k, case_id, name, found))
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
        values.append(float(np.corrcoef(rankdata(a[kept]), rankdata(b[kept]))[0, 1]) if varies else np.nan)
    return float(np.nanmean(values)) if np.isfinite(values).any() else np.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path, nargs="?", default=Path("../shared/data/hippocampus/manifest.yaml"))
    parser.add_argument("--method", action="append", default=None)
    parser.add_argument("--calibrators", type=Path, default=None)
    parser.add_argument("--replicates", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="leave it out: it needs real data and minutes")
    options = parser.parse_args()
    if options.quick:
        print("left out of the quick run")
        return
    if not options.manifest.is_file():
        print(f"{options.manifest}: the real data are not here; nothing is measured")
        return
    manifest = Manifest.load(options.manifest)
    rows = collect(manifest, options.method or ["ts", "cms_ap"], options.calibrators)
    bootstrap = Bootstrap([case_id for _, case_id, _, _ in rows], options.replicates, options.seed)
    tables = [Table.of(rows, name) for name in dict.fromkeys(row[2] for row in rows)]
    print_tables(tables, bootstrap)
    errors = {table.pipeline: table.columns["expected DSC"] - table.columns["true DSC"] for table in tables}
    record(
        entry(f"qa_hippocampus/{name}/RMSE of the expected DSC", float(np.sqrt(np.mean(error**2))), "DSC")
        for name, error in errors.items()
    )


@dataclass(frozen=True)
class Table:
    """The numbers of one pipeline, by column; rows are the test cases of all splits."""

    pipeline: str
    ids: list[str]
    split: NDArray[np.int64]
    columns: dict[str, NDArray[np.float64]]

    @classmethod
    def of(cls, rows: Rows, pipeline: str) -> Table:
        chosen = [row for row in rows if row[2] == pipeline]
        columns = {name: np.array([row[3][name] for row in chosen]) for name in chosen[0][3]}
        return cls(pipeline, [row[1] for row in chosen], np.array([row[0] for row in chosen]), columns)

    def correlation(self, name: str, truth: str, bootstrap: Bootstrap) -> str:
        x, y = self.columns[name], self.columns[truth]
        return bootstrap.interval(self.ids, lambda i: rank_correlation(x[i], y[i], self.split[i]))

    def agreement(self, name: str, truth: str, bootstrap: Bootstrap) -> list[str]:
        """Bias, RMSE and rank correlation of an expected with a true score."""
        error = self.columns[name] - self.columns[truth]
        bias = bootstrap.interval(self.ids, lambda i: float(np.nanmean(error[i])))
        rmse = bootstrap.interval(self.ids, lambda i: float(np.sqrt(np.nanmean(error[i] ** 2))))
        return [bias, rmse, self.correlation(name, truth, bootstrap)]

    def change(self, before: Table, bootstrap: Bootstrap) -> list[str]:
        """Paired differences of |bias|, RMSE and rank correlation to another pipeline on the same rows."""
        truth = self.columns["true DSC"]
        now, then = self.columns["expected DSC"], before.columns["expected DSC"]
        assert self.ids == before.ids

        def bias(x: NDArray[np.float64], i: NDArray[np.int64]) -> float:
            return abs(float(np.mean(x[i] - truth[i])))

        def rmse(x: NDArray[np.float64], i: NDArray[np.int64]) -> float:
            return float(np.sqrt(np.mean((x[i] - truth[i]) ** 2)))

        def rank(x: NDArray[np.float64], i: NDArray[np.int64]) -> float:
            return rank_correlation(x[i], truth[i], self.split[i])

        return [
            bootstrap.interval(self.ids, lambda i: bias(now, i) - bias(then, i)),
            bootstrap.interval(self.ids, lambda i: rmse(now, i) - rmse(then, i)),
            bootstrap.interval(self.ids, lambda i: rank(now, i) - rank(then, i)),
        ]


def print_tables(tables: list[Table], bootstrap: Bootstrap) -> None:
    """Agreement with the true DSC, other numbers as predictors of it, what the flags find, distributions."""
    print(f"{'pipeline':14}{'of':22}{'bias':>26}{'RMSE':>26}{'Spearman':>26}")
    for table in tables:
        for name in [name for name in table.columns if name.startswith("expected DSC")]:
            cells = table.agreement(name, name.replace("expected", "true"), bootstrap)
            print(f"{table.pipeline:14}{name.removeprefix('expected '):22}" + "".join(f"{cell:>26}" for cell in cells))
    print("\nCalibrated minus uncalibrated, expected against true mean DSC")
    for table in tables[1:]:
        cells = table.change(tables[0], bootstrap)
        print(f"{table.pipeline:14}{'DSC':22}" + "".join(f"{cell:>26}" for cell in cells))
    print("\nSpearman's rank correlation with the true mean DSC")
    for table in tables:
        for name, values in table.columns.items():
            if not name.startswith(("true", "expected DSC ")) and np.isfinite(values).any():
                print(f"{table.pipeline:14}{name:30}{table.correlation(name, 'true DSC', bootstrap):>26}")
    print("\nThe shipped thresholds, on the data they were chosen on")
    for table in tables:
        flagged, truth = table.columns["flags"] > 0, table.columns["true DSC"]
        for word, part in (("flagged", truth[flagged]), ("not flagged", truth[~flagged])):
            scores = f"true DSC mean {part.mean():.3f}, lowest {part.min():.3f}" if part.size else ""
            print(f"{table.pipeline:14}{word:12}{part.size:3} of {flagged.size}  {scores}")
        poor = truth < POOR
        print(f"{table.pipeline:14}{int((flagged & poor).sum())} of the {int(poor.sum())} below {POOR} are flagged")
    print("\nDistribution over the test cases: 0, 5, 50, 95, 100 %")
    for table in tables:
        for name, values in table.columns.items():
            if np.isfinite(values).any():
                ends = np.nanpercentile(values, [0, 5, 50, 95, 100])
                print(f"{table.pipeline:14}{name:30}" + "".join(f"{value:10.4f}" for value in ends))


if __name__ == "__main__":
    main()
