"""Bin tables pooled over cases, and where calibration makes a part of the image worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.evaluation.records import Records
from segcal.metrics.bins import BinTable
from segcal.report.wording import listing

WORTH_SAYING = 0.0005
"""A rise of the pooled ECE by less than 0.05 percentage points is not mentioned."""


@dataclass(frozen=True, slots=True)
class PooledTables:
    """Bin tables of a pipeline, pooled over cases and repeats; None where the run did not keep them.

    Whether channels are regions is told, not guessed from their number: a region model may have one.
    """

    records: Records
    ece_bins: int
    ace_bins: int
    regions: bool

    @classmethod
    def of(cls, records: Records, summary: Mapping[str, Any]) -> PooledTables:
        """With the bins that the summary names."""
        metrics = summary["settings"]["metrics"]
        return cls(records, int(metrics["ece_bins"]), int(metrics["ace_bins"]), bool(summary.get("regions")))

    def top_label(self, pipeline: str) -> BinTable | None:
        """Of the predicted class, all voxels."""
        pooled = self._pooled(f"top_label_{self.ece_bins}", pipeline)
        return None if pooled is None else BinTable.from_array(pooled.sum(axis=0))

    def band(self, pipeline: str, band: int) -> BinTable | None:
        """Of the predicted class, voxels of one distance band."""
        pooled = self._pooled(f"top_label_bands_{self.ace_bins}", pipeline)
        return None if pooled is None or band >= pooled.shape[1] else BinTable.from_array(pooled[:, band].sum(axis=0))

    def of_class(self, pipeline: str, index: int) -> BinTable | None:
        """Of class `index`; region models have one channel a region, whose class 1 is the region."""
        pooled = self._pooled(f"classwise_{self.ece_bins}", pipeline)
        if pooled is None:
            return None
        channel, position = (index, 1) if self.regions else (0, index)
        return BinTable.from_array(pooled[channel, position])

    def _pooled(self, name: str, pipeline: str) -> NDArray[np.float64] | None:
        rows = [row for row in self.records.rows if row.pipeline == pipeline]
        return self.records.table(name, pipeline) if rows and all(name in row.tables for row in rows) else None


def band_words(edges: Sequence[float]) -> list[str]:
    """`0 to 3`, ..., `15 or more`: voxels to the true boundary."""
    return [*(f"{low:g} to {high:g}" for low, high in pairwise(edges)), f"{edges[-1]:g} or more"]


def class_labels(summary: Mapping[str, Any]) -> list[str]:
    """Names of the classes, or of the regions."""
    return list(summary.get("classes") or summary["settings"]["metrics"].get("class_names") or [])


def where_worse(tables: PooledTables, summary: Mapping[str, Any], name: str, base: str) -> list[str]:
    """A sentence on the distance bands and classes whose pooled ECE is higher after calibration, if there are any."""
    bands = [
        part
        for k, words in enumerate(band_words(summary["settings"]["metrics"]["band_edges"]))
        for part in _risen(f"{words} voxels", tables.band(base, k), tables.band(name, k))
    ]
    classes = [
        part
        for k, label in enumerate(class_labels(summary))
        for part in _risen(label, tables.of_class(base, k), tables.of_class(name, k))
    ]
    parts = [f"by distance to the true boundary {listing(bands)}"] if bands else []
    parts += [f"by class {listing(classes)}"] if classes else []
    if not parts:
        return []
    return [f"Not better everywhere. With all cases pooled, ECE rises: {'; '.join(parts)} (no interval is given)."]


def _risen(where: str, before: BinTable | None, after: BinTable | None) -> list[str]:
    if before is None or after is None or not before.total or not after.total:
        return []
    low, high = before.ece(), after.ece()
    return [f"{where} ({low:.4f} → {high:.4f})"] if high - low >= WORTH_SAYING else []
