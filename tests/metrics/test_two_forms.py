"""The compiled loop and the torch operations count the same things, bit for bit."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given

from segcal.compiled.voxel_counts import BLOCK
from segcal.errors import DataError
from segcal.metrics import CaseFrame, MetricSettings, VoxelBatch
from segcal.metrics.compiled_sums import CompiledSums
from segcal.metrics.torch_sums import TorchSums
from segcal.metrics.voxel_sums import VoxelSums
from tests.metrics.cases import CASES, Case, draw_case, settings_for, small_cases


def as_bytes(sums: VoxelSums) -> dict[str, bytes]:
    """Every number of the sums, by name, in a form that compares bit for bit."""
    found: dict[str, bytes] = {"confusion": sums.confusion.tobytes()}
    for name in ("scores", "flips", "flips_deployed"):
        value = getattr(sums, name)
        found[name] = repr(None if value is None else asdict(value)).encode()
    tables = {"fine": sums.fine, "classwise": sums.classwise}
    tables |= {f"top_label {n}": table for n, table in sums.top_label.items()}
    for name, table in tables.items():
        for part, array in asdict(table).items():
            assert array.dtype in (np.int64, np.float64)
            found[f"{name} {part}"] = np.ascontiguousarray(array).tobytes()
    return found


def assert_two_forms_agree(batch: VoxelBatch) -> None:
    assert isinstance(batch.sums, CompiledSums)
    ours, by_torch = as_bytes(batch.sums), as_bytes(TorchSums(batch))
    assert ours.keys() == by_torch.keys()
    for name, content in ours.items():
        assert content == by_torch[name], name


def batches(
    probs: np.ndarray, labels: np.ndarray, chosen: MetricSettings, *, seed: int = 0, chunk: int = 1 << 17
) -> list[VoxelBatch]:
    """With a decision and a deployed segmentation that differ from the winner at some voxels, and some outside."""
    rng = np.random.default_rng(seed)
    winner = probs.argmax(axis=0)
    maps = {}
    for name in ("decision", "deployed"):
        other = rng.integers(0, len(probs), labels.shape)
        maps[name] = torch.from_numpy(np.where(rng.random(labels.shape) < 0.2, other, winner))
    inside = torch.from_numpy(rng.random(labels.shape) < 0.8)
    frame = CaseFrame.build("case", torch.from_numpy(labels), chosen, inside=inside, chunk=chunk, **maps)
    return list(frame.batches(torch.from_numpy(probs)))


@pytest.mark.parametrize("name", sorted(CASES))
def test_both_forms_agree_on_every_case(name: str) -> None:
    probs, labels = CASES[name]()
    for batch in batches(probs, labels, settings_for(len(probs), extra_bins=(20, 5))):
        assert_two_forms_agree(batch)


@given(small_cases())
def test_both_forms_agree_on_cases_full_of_coincidences(case: Case) -> None:
    for batch in batches(*case, settings_for(len(case[0]))):
        assert_two_forms_agree(batch)


@pytest.mark.parametrize("n_classes", [2, 5, 40])
@pytest.mark.parametrize("sharpness", [1.0, 4.0, 9.0])
def test_both_forms_agree_on_many_voxels_of_all_degrees_of_doubt(n_classes: int, sharpness: float) -> None:
    """Enough voxels that one rounding in ten million would show in a sum."""
    probs, labels = draw_case(n_classes, (40, 57, 61), n_classes, sharpness=sharpness, ignored=0.01)
    for batch in batches(probs, labels, settings_for(n_classes)):
        assert_two_forms_agree(batch)


@pytest.mark.parametrize("n_voxels", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_both_forms_agree_at_the_ends_of_blocks(n_voxels: int) -> None:
    probs, labels = draw_case(3, (1, n_voxels), 3, sharpness=6.0)
    for batch in batches(probs, labels, settings_for(3)):
        assert_two_forms_agree(batch)


def test_both_forms_agree_on_every_settled_confidence_and_on_those_above_one() -> None:
    steps = np.arange(-40, (1 << 14) + 40)
    top = (1.0 - steps / 2.0**24).astype(np.float32)
    top = np.concatenate([top, np.linspace(1, 1.0019, 50, dtype=np.float32)])
    probs = np.stack([top, np.maximum(np.float32(1) - top, np.float32(0))])[:, None]
    labels = np.random.default_rng(0).integers(0, 2, (1, len(top)))
    for truth in (np.zeros_like(labels), np.ones_like(labels), labels):
        for batch in batches(probs, truth, settings_for(2)):
            assert_two_forms_agree(batch)


def test_without_decision_crop_or_space_both_forms_agree() -> None:
    probs, labels = draw_case(8, (5, 6, 7), 3)
    frame = CaseFrame.build("case", torch.from_numpy(labels), settings_for(3), spatial=False)
    for batch in frame.batches(torch.from_numpy(probs)):
        assert batch.sums.flips is None
        assert_two_forms_agree(batch)


def test_rows_of_classes_in_any_memory_order_are_counted_alike() -> None:
    probs, labels = draw_case(9, (900,), 4)
    rows = torch.from_numpy(np.ascontiguousarray(probs.T))
    frame = CaseFrame.build("case", torch.from_numpy(labels), settings_for(4), spatial=False)
    (one,), (other,) = frame.batches(rows.T), frame.batches(torch.from_numpy(probs))
    assert as_bytes(one.sums) == as_bytes(other.sums)


@pytest.mark.parametrize("why", ["float64", "many bins", "coarse common grid", "many classes"])
def test_what_the_loop_does_not_take_is_counted_by_torch(why: str) -> None:
    n_classes = 300 if why == "many classes" else 3
    probs, labels = draw_case(9, (5, 6, 7), n_classes, sharpness=5.0)
    bins = {"many bins": {"ece_bins": 400}, "coarse common grid": {"extra_bins": (49, 11)}}.get(why, {})
    frame = CaseFrame.build("case", torch.from_numpy(labels), settings_for(n_classes, **bins))
    values = torch.from_numpy(probs)
    values = values.double() if why == "float64" else values
    for batch in frame.batches(values):
        assert isinstance(batch.sums, TorchSums)
        assert batch.sums.scores.voxels == labels.size


LIMIT = np.float32(1.0 + 2e-3)


@pytest.mark.parametrize(
    ("voxel", "good"),
    [
        ((1.0, 0.0, 0.0), True),
        ((0.5, 0.5, 0.0), True),
        ((float(np.nextafter(LIMIT, np.float32(0))), 0.0, 0.0), True),
        ((float(np.nextafter(LIMIT, np.float32(2))), 0.0, 0.0), False),
        ((0.999, 0.0, 0.0), True),
        ((0.997, 0.0, 0.0), False),
        ((1.0, -1e-9, 0.0), False),
        ((1.0, float("nan"), 0.0), False),
        ((float("nan"), 0.5, 0.5), False),
        ((float("inf"), 0.0, 0.0), False),
        ((float("inf"), float("-inf"), 0.0), False),
    ],
)
@pytest.mark.parametrize("place", [0, BLOCK + 3, 2 * BLOCK - 1])
def test_both_forms_refuse_the_same_voxels(voxel: tuple[float, ...], good: bool, place: int) -> None:
    probs, labels = draw_case(10, (1, 2 * BLOCK), 3)
    probs[:, 0, place] = voxel
    wide = torch.from_numpy(probs.astype(np.float64))
    frame = CaseFrame.build("case", torch.from_numpy(labels), settings_for(3))
    for values in (torch.from_numpy(probs), wide):
        if good:
            assert len(list(frame.batches(values))) == 1
        else:
            with pytest.raises(DataError, match="case: "):
                list(frame.batches(values))
