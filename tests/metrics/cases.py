"""Random and adversarial cases that all metric tests share, and the one call that measures a case."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import strategies as st

from segcal.metrics import CaseFrame, CaseResult, MetricSettings, make_metrics

Case = tuple[np.ndarray, np.ndarray]


def draw_case(
    seed: int, shape: tuple[int, ...], n_classes: int, *, sharpness: float = 3.0, ignored: float = 0.0
) -> Case:
    """(C, *shape) float32 probabilities of a blob-like label map and the labels with a share of ignored voxels."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij"))
    radius = np.sqrt(np.square(grid - rng.uniform(-0.3, 0.3, (len(shape),) + (1,) * len(shape))).sum(axis=0))
    labels = np.minimum((radius < 0.6).astype(np.int64) * (1 + (grid[0] > 0)), n_classes - 1)
    logits = rng.normal(size=(n_classes, *shape)) * sharpness
    np.put_along_axis(logits, labels[None], np.take_along_axis(logits, labels[None], 0) + 2 * sharpness, 0)
    logits -= logits.max(axis=0)
    probs = np.exp(logits) / np.exp(logits).sum(axis=0)
    labels[rng.random(shape) < ignored] = -1
    return probs.astype(np.float32), labels


def _one_class() -> Case:
    return draw_case(1, (4, 5, 6), 3)[0], np.zeros((4, 5, 6), dtype=np.int64)


def _zero_and_one() -> Case:
    rng = np.random.default_rng(2)
    winner, labels = rng.integers(0, 3, (2, 5, 6, 4))
    return np.eye(3, dtype=np.float32)[winner].transpose(3, 0, 1, 2).copy(), labels.astype(np.int64)


def _bin_edges() -> Case:
    """Confidences on and next to the edges of 15 and 50 bins, 0.1 * 3 among them."""
    steps = np.concatenate([np.arange(0, 16) / 15, np.arange(0, 51) / 50, [0.1 * 3, 0.1 * 7, 0.57 + 0.01]])
    steps = steps.astype(np.float32)
    steps = np.concatenate([steps, np.nextafter(steps, np.float32(0)), np.nextafter(steps, np.float32(1))])
    steps = steps[steps <= 1]
    labels = np.random.default_rng(3).integers(0, 2, (1, len(steps)))
    return np.stack([steps, 1 - steps])[:, None].astype(np.float32), labels.astype(np.int64)


def _ties() -> Case:
    probs = np.full((4, 3, 7), 0.25, dtype=np.float32)
    probs[:, 1] = np.array([0.1, 0.4, 0.4, 0.1], dtype=np.float32)[:, None]
    return probs, np.random.default_rng(4).integers(0, 4, (3, 7)).astype(np.int64)


def _mostly_ignored() -> Case:
    probs, labels = draw_case(5, (6, 6, 6), 4)
    labels[:] = -1
    labels[0, 0, :3] = [0, 1, 0]
    return probs, labels


def _tiny() -> Case:
    """Probabilities below, at and above the floor for the true class."""
    p = np.array([0.0, 1e-45, 1.1754942e-38, 1.1754944e-38, 1.2e-38, 0.3], dtype=np.float32)
    return np.stack([1 - p, p])[:, None], np.ones((1, len(p)), dtype=np.int64)


def _long_rod() -> Case:
    """A boundary at one end, so that all four bands are filled and several edges (3, 7, 15) are hit exactly."""
    probs, _ = draw_case(6, (2, 2, 40), 3)
    labels = np.zeros((2, 2, 40), dtype=np.int64)
    labels[..., :2] = 1
    return probs, labels


CASES: dict[str, Callable[[], Case]] = {
    "3d": lambda: draw_case(10, (6, 9, 8), 4),
    "2d": lambda: draw_case(11, (17, 19), 3),
    "2d as 3d": lambda: draw_case(12, (1, 16, 18), 3),
    "two classes": lambda: draw_case(13, (5, 8, 7), 2, sharpness=1.0),
    "blurred": lambda: draw_case(14, (5, 8, 7), 5, sharpness=0.3),
    "certain": lambda: draw_case(15, (5, 8, 7), 5, sharpness=12.0),
    "ignored voxels": lambda: draw_case(16, (6, 8, 7), 4, ignored=0.3),
    "one label": _one_class,
    "confidence 0 and 1": _zero_and_one,
    "bin edges": _bin_edges,
    "ties": _ties,
    "nearly all ignored": _mostly_ignored,
    "tiny probabilities": _tiny,
    "four bands": _long_rod,
    "one voxel": lambda: draw_case(17, (1, 1, 1), 3),
}


def settings_for(n_classes: int, **changes: object) -> MetricSettings:
    return MetricSettings(class_names=tuple(f"c{k}" for k in range(n_classes)), **changes)  # type: ignore[arg-type]


def measure(
    probs: np.ndarray,
    labels: np.ndarray,
    *,
    decision: np.ndarray | None = None,
    deployed: np.ndarray | None = None,
    inside: np.ndarray | None = None,
    spatial: bool = True,
    **changes: object,
) -> CaseResult:
    """All metrics of one case."""
    settings = settings_for(len(probs), **changes)
    given = {"decision": decision, "deployed": deployed, "inside": inside}
    maps = {name: None if value is None else torch.from_numpy(value) for name, value in given.items()}
    frame = CaseFrame.build("case", torch.from_numpy(labels), settings, spatial=spatial, **maps)
    metrics = make_metrics(settings)
    metrics.update(frame, torch.from_numpy(probs))
    return metrics.take("case")


@st.composite
def small_cases(draw: st.DrawFn, dtype: type[np.floating] = np.float32) -> Case:
    """Few voxels with many coincidences: probabilities from a short list of values, ties, ignored voxels."""
    n_classes = draw(st.integers(2, 4))
    shape = draw(st.sampled_from([(7,), (3, 4), (2, 3, 3), (1, 1, 9)]))
    shape = (1, *shape) if len(shape) == 1 else shape
    n = int(np.prod(shape))
    steps = st.sampled_from([0.0, 1e-30, 1e-3, 0.1, 0.2, 0.1 * 3, 1 / 3, 0.5, 0.58, 0.7, 0.9, 1.0])
    weights = np.array(draw(st.lists(steps, min_size=n * n_classes, max_size=n * n_classes)))
    weights = weights.reshape(n_classes, *shape)
    weights[0, weights.sum(axis=0) == 0] = 1.0
    labels = np.array(draw(st.lists(st.integers(-1, n_classes - 1), min_size=n, max_size=n)), dtype=np.int64)
    labels[draw(st.integers(0, n - 1))] = 0  # at least one voxel counts
    return (weights / weights.sum(axis=0)).astype(dtype), labels.reshape(shape)
