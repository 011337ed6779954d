"""The condensed sample: unbiased, bounded, the same for any order and any workers; and the NLL it estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from segcal.calibrators import CALIBRATORS, Calibrator
from segcal.calibrators.temperature import TemperatureScaling
from segcal.compiled.scores import PIECE
from segcal.fitting import condense
from segcal.fitting.condense import RowReservoir
from segcal.fitting.likelihood import Likelihood, mean_nll
from segcal.fitting.rows import CONTROL_TEMPERATURES, Rows
from tests.conformance.drawn import draw_calibrator
from tests.fitting.drawn import imbalanced_rows

N_CASES, N_VOXELS, N_CLASSES = 3, 4000, 3


@pytest.fixture(autouse=True)
def small_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A floor of rows per class that fits the small data here."""
    monkeypatch.setattr(condense, "MIN_ROWS_PER_CLASS", 100)


@pytest.fixture(scope="module")
def cases() -> dict[str, Rows]:
    return {f"case_{k}": imbalanced_rows(N_VOXELS, N_CLASSES, seed=k) for k in range(N_CASES)}


def add(reservoir: RowReservoir, case_id: str, rows: Rows) -> None:
    reservoir.add(case_id, rows.logits.T, rows.labels, rows.decision, torch.arange(rows.n_rows))


def condensed(cases: dict[str, Rows], *, seed: int = 0, max_rows: int = 900, order: Sequence[str] = ()) -> Rows:
    reservoir = RowReservoir(N_CLASSES, seed, max_rows)
    for case_id in order or cases:
        add(reservoir, case_id, cases[case_id])
    return reservoir.sample()


def same_bits(first: Rows, second: Rows) -> bool:
    pairs = [(getattr(first, name), getattr(second, name)) for name in first.__slots__ if name != "control_nll"]
    return all(torch.equal(a, b) for a, b in pairs) and first.control_nll == second.control_nll


def together(cases: dict[str, Rows]) -> tuple[Tensor, Tensor, Tensor]:
    parts = list(cases.values())
    return (
        torch.cat([p.logits for p in parts]),
        torch.cat([p.labels for p in parts]),
        torch.cat([p.decision for p in parts]),
    )


def measures(logits: Tensor, labels: Tensor, decision: Tensor) -> Tensor:
    """(n, k) quantities whose sums the sample must not bias: counts, losses, errors, logits."""
    nll = -torch.log_softmax(logits.double(), 1).gather(1, labels[:, None])
    confidence = torch.softmax(logits.double(), 1).amax(1, keepdim=True)
    wrong = (labels != decision)[:, None].double()
    return torch.cat([torch.ones_like(nll), nll, wrong, confidence, logits.double()[:, :2], nll * confidence], 1)


def test_sums_over_the_sample_are_unbiased(cases: dict[str, Rows]) -> None:
    truth = measures(*together(cases)).sum(0)
    estimates = []
    for seed in range(60):
        rows = condensed(cases, seed=seed)
        assert rows.n_rows < 0.2 * N_CASES * N_VOXELS
        estimates.append(rows.weights @ measures(rows.logits, rows.labels, rows.decision))
    found = torch.stack(estimates)
    error = found.std(0) / len(estimates) ** 0.5
    assert (error > 0).all()
    assert ((found.mean(0) - truth).abs() < 4 * error).all()


def test_sums_within_each_predicted_class_are_unbiased(cases: dict[str, Rows]) -> None:
    _, _, decision = together(cases)
    truth = torch.bincount(decision, minlength=N_CLASSES).double()
    samples = [condensed(cases, seed=seed) for seed in range(60)]
    found = torch.stack([torch.bincount(s.decision, weights=s.weights, minlength=N_CLASSES) for s in samples])
    error = (found.std(0) / 60**0.5).clamp(min=1e-9)  # a class that is kept whole has no error at all
    assert ((found.mean(0) - truth).abs() <= 4 * error).all()
    assert all(torch.equal(sample.counts, truth) for sample in samples)


def test_doubtful_voxels_are_kept_and_certain_ones_thinned(cases: dict[str, Rows]) -> None:
    rows = condensed(cases)
    wrong = rows.labels != rows.decision
    assert rows.weights[wrong].mean() < 0.2 * rows.weights[~wrong].mean()
    assert (rows.weights >= 1).all()


def test_the_order_of_cases_changes_no_bit(cases: dict[str, Rows]) -> None:
    names = list(cases)
    expected = condensed(cases)
    for order in ([names[2], names[0], names[1]], names[::-1]):
        assert same_bits(condensed(cases, order=order), expected)


def test_blocks_change_no_row(cases: dict[str, Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = condensed(cases)
    monkeypatch.setattr(condense, "BLOCK_VOXELS", 333)
    found = condensed(cases)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.labels, expected.labels)
    assert torch.equal(found.weights, expected.weights)
    assert found.control_nll == pytest.approx(expected.control_nll, rel=1e-13)


def test_blocks_of_whole_pieces_change_no_bit_of_the_sums_either(
    cases: dict[str, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = condensed(cases)
    monkeypatch.setattr(condense, "BLOCK_VOXELS", 3 * PIECE)
    assert same_bits(condensed(cases), expected)


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_merged_reservoirs_equal_one_that_saw_everything(cases: dict[str, Rows], cut: int) -> None:
    names = list(cases)
    first, second = RowReservoir(N_CLASSES, 0, 900), RowReservoir(N_CLASSES, 0, 900)
    for case_id in names[cut:]:
        add(first, case_id, cases[case_id])
    for case_id in names[:cut]:
        add(second, case_id, cases[case_id])
    first.merge(second)
    assert same_bits(first.sample(), condensed(cases))


def test_the_seed_decides_the_sample(cases: dict[str, Rows]) -> None:
    assert same_bits(condensed(cases, seed=5), condensed(cases, seed=5))
    assert not same_bits(condensed(cases, seed=5), condensed(cases, seed=6))


def test_the_sample_is_bounded_and_every_predicted_class_has_its_share(cases: dict[str, Rows]) -> None:
    for max_rows in (30, 900, 3000):
        rows = condensed(cases, max_rows=max_rows)
        share = max(max_rows // N_CLASSES, condense.MIN_ROWS_PER_CLASS)
        kept = torch.bincount(rows.decision, minlength=N_CLASSES)
        assert torch.equal(kept, rows.counts.long().clamp(max=share))


def test_memory_is_bounded_while_cases_are_added(cases: dict[str, Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(condense, "BLOCK_VOXELS", 256)
    reservoir = RowReservoir(N_CLASSES, 0, 300)
    largest = 0
    original = RowReservoir._push

    def push(self: RowReservoir, expert: int, rows: condense._Kept) -> None:
        nonlocal largest
        original(self, expert, rows)
        largest = max(largest, *(kept.priority.shape[0] for kept in self._kept.values()))

    monkeypatch.setattr(RowReservoir, "_push", push)
    for case_id, rows in cases.items():
        add(reservoir, case_id, rows)
    assert largest <= 4 * reservoir.rows_per_class + 1


def test_data_that_fit_are_kept_exactly(cases: dict[str, Rows]) -> None:
    rows = condensed(cases, max_rows=3 * N_CASES * N_VOXELS)
    logits, labels, decision = together(cases)
    assert rows.n_rows == len(labels)
    assert (rows.weights == 1).all()
    assert sorted(map(tuple, rows.logits.tolist())) == sorted(map(tuple, logits.tolist()))
    assert rows.n_voxels == len(labels)
    for name in ("ts", "dc", "cms_ap"):
        calibrator = draw_calibrator(name, N_CLASSES)
        assert mean_nll(calibrator, rows) == pytest.approx(true_nll(calibrator, logits, labels, decision), rel=1e-12)


def test_a_case_is_added_once(cases: dict[str, Rows]) -> None:
    reservoir, other = RowReservoir(N_CLASSES), RowReservoir(N_CLASSES)
    for each in (reservoir, other):
        add(each, "case_0", cases["case_0"])
    with pytest.raises(ValueError, match="case_0 was added twice"):
        add(reservoir, "case_0", cases["case_0"])
    with pytest.raises(ValueError, match="case_0 was added twice"):
        reservoir.merge(other)


def test_an_empty_reservoir_gives_no_rows() -> None:
    rows = RowReservoir(N_CLASSES).sample()
    assert (rows.n_rows, rows.n_voxels, rows.logits.shape) == (0, 0, (0, N_CLASSES))


def true_nll(calibrator: Calibrator, logits: Tensor, labels: Tensor, decision: Tensor) -> float:
    log_q = calibrator.log_probs(logits.double(), decision)
    return float(-log_q.gather(1, labels[:, None]).mean())


def test_control_losses_are_exact(cases: dict[str, Rows]) -> None:
    logits, labels, decision = together(cases)
    rows = condensed(cases)
    assert rows.control_nll is not None
    expected = [true_nll(TemperatureScaling(t), logits, labels, decision) for t in CONTROL_TEMPERATURES]
    assert rows.control_nll == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("name", ["ts", "ets", "ms_c", "cms_op"])
def test_the_regression_estimate_is_closer_to_the_truth_than_the_weighted_sum(
    cases: dict[str, Rows], name: str
) -> None:
    calibrator = near_identity(name)
    truth = true_nll(calibrator, *together(cases))
    plain, regressed = [], []
    for seed in range(25):
        rows = condensed(cases, seed=seed)
        plain.append(mean_nll(calibrator, replace(rows, control_nll=None)) - truth)
        regressed.append(Likelihood(rows).mean(calibrator) - truth)
    assert np.abs(np.mean(plain)) < 4 * np.std(plain) / 5
    assert rms(regressed) < 0.6 * rms(plain)
    assert rms(regressed) < 1e-2 * truth


def near_identity(name: str) -> Calibrator:
    """A calibrator as a fit would give: half way from identity to a random one (T = 1.5 for the temperatures)."""
    if name == "ts":
        return TemperatureScaling(1.5)
    cls = CALIBRATORS[name]
    if name == "ets":
        tensors = {"temperature": torch.tensor([1.5]), "mixture": torch.tensor([0.75, 0.125, 0.125])}
        return cls.from_tensors({key: value.double() for key, value in tensors.items()})
    start, far = cls.identity(N_CLASSES).tensors(), draw_calibrator(name, N_CLASSES).tensors()
    return cls.from_tensors({key: 0.9 * start[key] + 0.1 * far[key] for key in start})


def rms(errors: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))
