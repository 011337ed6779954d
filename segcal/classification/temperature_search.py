"""Temperature scaling by other objectives than the likelihood: soft-binned (SB-ECE) and hard-binned ECE."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from segcal.calibrators.base import Preserves
from segcal.calibrators.temperature import T_MAX, T_MIN, TemperatureScaling
from segcal.classification.base import RowMethod
from segcal.classification.losses.soft_ece import SoftBinnedECE
from segcal.classification.one_vs_rest import check_labelled
from segcal.classification.samples import Samples
from segcal.counted import count
from segcal.errors import ParameterError
from segcal.fitting.exact import FEW_VOXELS

GRID_POINTS = 41
"""Temperatures of the first level, log-spaced over [T_MIN, T_MAX] = [0.01, 100]: 1.26 apart."""
ZOOM_POINTS = 21
"""Of every further level, between the neighbours of the best so far: ten times finer."""
ZOOM_LEVELS = 3
"""So T is found to 0.02 %; V = 41 + 3 · 21 = 104 temperatures are looked at."""
GRID_ROWS = 20_000
"""TS-SB-ECE finds the valley on at most so many rows (every k-th) and its bottom on all of them."""

Objective = Callable[[float], float]


@dataclass(frozen=True, slots=True, eq=False)
class _SearchedTemperature(RowMethod):
    """softmax(z / T), T by a search; keeps the ranking like temperature scaling does."""

    translation_invariant: ClassVar[bool] = True
    preserves: ClassVar[Preserves] = "order"
    by_class: ClassVar[bool] = False

    temperature: float
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ParameterError(f"{self.name}: temperature must be finite and > 0, got {self.temperature!r}")

    @property
    def n_classes(self) -> int | None:
        return None

    def probabilities(self, samples: Samples) -> Tensor:
        return TemperatureScaling(self.temperature).probabilities(samples.logits, class_axis=1)

    def tensors(self) -> dict[str, Tensor]:
        return {"temperature": torch.full((1,), self.temperature, dtype=torch.float64, device="cpu")}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls(TemperatureScaling.from_tensors(tensors).temperature)

    @classmethod
    def _of(cls, temperature: float, n_rows: int) -> Self:
        warnings = []
        if n_rows < FEW_VOXELS:  # where `ts` says so
            warnings.append(f"{cls.name} was fitted on only {count(n_rows, 'row')}")
        if not T_MIN * 1.01 < temperature < T_MAX / 1.01:
            warnings.append(
                f"{cls.name}: the temperature ran to its bound {temperature:g}; the scores are constant or always right"
            )
        return cls(temperature, tuple(warnings))


class SoftBinnedTemperature(_SearchedTemperature):
    """TS-SB-ECE (SOFT 4.1, 5.2): T minimises the soft-binned ECE of the winning class (eq. 8-11)."""

    name: ClassVar[str] = "ts_sb_ece"

    @classmethod
    def fit(  # type: ignore[override]
        cls, samples: Samples, *, seed: int = 0, bins: int = 15, softness: float = 0.01, norm: float = 2.0
    ) -> Self:
        """A grid over T finds the valley, a bounded search its bottom. Draws nothing.

        Args:
            samples: labelled.
            seed: not used.
            bins: M, of equal width.
            softness: T of the bin membership softmax(-(c - centre)^2 / T); the paper tunes it, ours is fixed.
            norm: p, as the paper measures it.
        """
        _check(cls.name, bins, norm)
        if not 0 < softness < math.inf:
            raise ParameterError(f"{cls.name}: softness must be finite and > 0, got {softness!r}")
        check_labelled(samples, cls.name)

        def objective(part: Samples) -> Objective:
            behind, hits = _margins(part)
            return lambda t: soft_binned_ece(_confidence(behind, t), hits, bins, softness, norm)

        step = max(samples.n_rows // GRID_ROWS, 1)
        thinned = objective(samples.rows(torch.arange(0, samples.n_rows, step, device=samples.logits.device)))
        grid = np.geomspace(T_MIN, T_MAX, 2 * GRID_POINTS - 1)
        best = _best(thinned, grid)
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        whole = objective(samples)
        refined = optimize.minimize_scalar(
            lambda x: whole(float(np.exp(x))),
            bounds=(np.log(low), np.log(high)),
            method="bounded",
            options={"xatol": 1e-6},
        )
        return cls._of(float(np.exp(refined.x)), samples.n_rows)


class HardBinnedTemperature(_SearchedTemperature):
    """TS-HB-ECE (SOFT App. C): T by multi-resolution search over the hard-binned ECE of the winning class.

    The paper leaves range, levels, bins and norm open; ours are the constants of this module and the defaults below.
    """

    name: ClassVar[str] = "ts_hb_ece"

    @classmethod
    def fit(  # type: ignore[override]
        cls, samples: Samples, *, seed: int = 0, bins: int = 15, norm: float = 1.0
    ) -> Self:
        """Ever finer grids around the best temperature; among equals the one nearest to 1. Draws nothing.

        Args:
            samples: labelled.
            seed: not used.
            bins: equal-width bins [j/B, (j+1)/B), the last closed.
            norm: p of the error.
        """
        _check(cls.name, bins, norm)
        check_labelled(samples, cls.name)
        behind, hits = _margins(samples)

        def objective(t: float) -> float:
            return hard_binned_ece(_confidence(behind, t), hits, bins, norm)

        grid = np.geomspace(T_MIN, T_MAX, GRID_POINTS)
        for _ in range(ZOOM_LEVELS):
            best = _best(objective, grid)
            grid = np.geomspace(grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)], ZOOM_POINTS)
        return cls._of(float(grid[_best(objective, grid)]), samples.n_rows)


def soft_binned_ece(confidence: Tensor, hits: Tensor, bins: int, softness: float, norm: float) -> float:
    """SB-ECE_bin,p of SOFT eq. 8-11, as the training loss has it.

    Args:
        confidence: (n,) of the winning class.
        hits: (n,) float64, 1 where it is right.
        bins, softness, norm: M, T and p.
    """
    moment = SoftBinnedECE(n_bins=bins, temperature=softness, p=norm).moment(confidence, hits)
    return float(moment.pow(1.0 / norm))


def hard_binned_ece(confidence: Tensor, hits: Tensor, bins: int, norm: float) -> float:
    """(sum_b n_b/n |acc_b - conf_b|^p)^(1/p) over equal-width bins."""
    index = (confidence * bins).to(torch.int64).clamp(max=bins - 1)
    size = torch.bincount(index, minlength=bins).to(torch.float64)
    gap = torch.bincount(index, hits - confidence, minlength=bins).abs()
    terms = size * (gap / size.clamp(min=1.0)).pow(norm)
    return float((terms.sum() / len(hits)).pow(1.0 / norm))


def _margins(samples: Samples) -> tuple[Tensor, Tensor]:
    """(n, C) how far every class is behind the winner, at most 0; (n,) whether the winner is right."""
    hits = (samples.decision == samples.known_labels).to(torch.float64)
    return samples.logits - samples.logits.amax(1, keepdim=True), hits


def _confidence(behind: Tensor, temperature: float) -> Tensor:
    return 1.0 / torch.exp(behind / temperature).sum(1)


def _best(objective: Objective, grid: np.ndarray[tuple[int], np.dtype[np.float64]]) -> int:
    """The index of the lowest value; among equals the temperature nearest to 1."""
    scored = [(objective(float(t)), abs(float(np.log(t))), index) for index, t in enumerate(grid)]
    return min(scored)[2]


def _check(method: str, bins: int, norm: float) -> None:
    if bins < 1 or not 1 <= norm < math.inf:
        raise ParameterError(f"{method}: bins and norm must be at least 1 and finite, got {bins} and {norm!r}")
