"""What every loss of the registry promises: `CalibrationLoss` states it, this suite runs over `LOSSES`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from segcal.classification.losses import LOSSES, BinaryRegions, Composite, make_loss
from segcal.classification.losses import chunks as chunks_module
from segcal.errors import DataError, ParameterError, UsageError

EVERY = pytest.mark.parametrize("name", LOSSES)


def draw(shape: tuple[int, ...], n_classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(n, C, *spatial) float32 logits of a half-decent classifier and (n, *spatial) labels."""
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(rng.integers(0, n_classes, shape))
    logits = torch.from_numpy(rng.normal(0, 1.5, (shape[0], n_classes, *shape[1:]))).float()
    logits = logits.scatter_add(1, labels[:, None], torch.full((shape[0], 1, *shape[1:]), 1.5))
    return logits, labels


def value_and_gradient(name: str, logits: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    value = make_loss(name, **options)(leaf, labels)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


@EVERY
def test_dense_and_flattened_batches_agree(name: str) -> None:
    logits, labels = draw((2, 4, 5, 3))
    value, gradient = value_and_gradient(name, logits, labels)
    rows, flat = logits.movedim(1, -1).reshape(-1, 3), labels.reshape(-1)
    flat_value, flat_gradient = value_and_gradient(name, rows, flat)
    torch.testing.assert_close(value, flat_value)
    torch.testing.assert_close(gradient.movedim(1, -1).reshape(-1, 3), flat_gradient)


@EVERY
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32])
def test_labels_come_as_nnunet_has_them(name: str, dtype: torch.dtype) -> None:
    logits, labels = draw((2, 6, 5))
    assert make_loss(name)(logits, labels[:, None].to(dtype)) == make_loss(name)(logits, labels)


@EVERY
def test_ignored_voxels_count_as_little_as_absent_ones(name: str) -> None:
    logits, labels = draw((2, 6, 5))
    ignored = torch.from_numpy(np.random.default_rng(1).uniform(size=labels.shape) < 0.4)
    value, gradient = value_and_gradient(name, logits, labels.masked_fill(ignored, 7), ignore_index=7)
    kept = logits.movedim(1, -1)[~ignored]
    expected, kept_gradient = value_and_gradient(name, kept, labels[~ignored])
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient.movedim(1, -1)[~ignored], kept_gradient)
    assert (gradient.movedim(1, -1)[ignored] == 0).all()


@EVERY
def test_a_batch_of_ignored_voxels_only_gives_zero_and_no_gradient(name: str) -> None:
    logits, labels = draw((2, 6))
    value, gradient = value_and_gradient(name, logits, torch.full_like(labels, -100))
    assert value == 0
    assert (gradient == 0).all()


@EVERY
def test_the_order_of_samples_does_not_matter(name: str) -> None:
    logits, labels = draw((60,))
    logits[30:40] = logits[:10]  # equal confidences, too
    order = torch.from_numpy(np.random.default_rng(2).permutation(60))
    value, gradient = value_and_gradient(name, logits, labels)
    again, permuted = value_and_gradient(name, logits[order], labels[order])
    torch.testing.assert_close(value, again)
    torch.testing.assert_close(gradient[order], permuted)


@EVERY
def test_a_constant_added_to_a_voxels_logits_changes_nothing(name: str) -> None:
    logits, labels = draw((60,))
    shift = torch.from_numpy(np.random.default_rng(3).normal(0, 5, (60, 1)))
    value = make_loss(name)(logits.double(), labels)
    torch.testing.assert_close(make_loss(name)(logits.double() + shift, labels), value)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_value_and_gradient_stay_finite_at_extreme_logits(name: str, dtype: torch.dtype) -> None:
    """Probabilities of exactly 0 and 1, right and wrong, ties, and ordinary voxels beside them."""
    extreme = torch.tensor(
        [[1e4, -1e4, -1e4], [-1e4, 1e4, 0.0], [0.0, 0.0, 0.0], [1e4, 1e4, -1e4], [50.0, 0.0, -50.0], [0.1, 0.0, 0.2]]
    ).to(dtype)
    for labels in ([0, 1, 0, 0, 0, 2], [1, 0, 1, 2, 2, 0], [2, 2, 2, 1, 1, 1]):
        value, gradient = value_and_gradient(name, extreme, torch.tensor(labels))
        assert value.isfinite()
        assert gradient.isfinite().all()
        assert gradient.dtype == dtype
    for row in extreme:  # a voxel alone: no spread, one bin, nothing to compare with
        value, gradient = value_and_gradient(name, row[None], torch.tensor([1]))
        assert value.isfinite()
        assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"gamma": 0.1}) for name in ("focal", "inverse_focal", "dual_focal", "dual_focal_released")),
        *((name, {"p": p}) for name in ("sb_ece", "sb_ece_lb", "kde_ce", "kde_xe") for p in (1.0, 7.0)),
        *(("kde_ce", {"kind": kind, "bandwidth": 1e-5}) for kind in ("canonical", "marginal", "top_label")),
        ("s_avuc", {"temperature": 4.0, "kappa": 0.01}),
        ("sb_ece", {"temperature": 1e-9}),
        ("au_p", {"nu": 1e-4, "score": "margin"}),
        ("mmce_w", {"bandwidth": 0.01}),
    ],
    ids=str,
)
def test_unusual_parameters_keep_gradients_finite_too(name: str, options: dict[str, Any]) -> None:
    loss = make_loss(name, **options)
    logits = torch.tensor([[1e4, -1e4], [-1e4, 1e4], [0.0, 0.0], [3.0, -2.0]], requires_grad=True)
    for labels in ([0, 1, 0, 0], [1, 0, 1, 1]):
        (gradient,) = torch.autograd.grad(loss(logits, torch.tensor(labels)), logits)
        assert gradient.isfinite().all()


@EVERY
def test_autocast_computes_in_float32(name: str) -> None:
    logits, labels = draw((2, 30, 5))
    half = logits.bfloat16()
    expected, expected_gradient = value_and_gradient(name, half.float(), labels)
    leaf = half.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = make_loss(name)(leaf, labels)
    (gradient,) = torch.autograd.grad(value, leaf)  # outside, as torch advises and nnU-Net does
    value = value.detach()
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, expected_gradient.bfloat16())


@EVERY
def test_the_same_batch_gives_the_same_bytes(name: str) -> None:
    logits, labels = draw((2, 2000))
    first, second = (value_and_gradient(name, logits, labels) for _ in range(2))
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])


@EVERY
def test_inputs_are_left_as_they_were(name: str) -> None:
    logits, labels = draw((2, 30))
    labels[0, :5] = -100
    before = logits.clone(), labels.clone()
    value_and_gradient(name, logits, labels)
    assert torch.equal(logits, before[0])
    assert torch.equal(labels, before[1])


@EVERY
def test_pieces_of_any_size_give_the_same_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = draw((2, 100))
    value, gradient = value_and_gradient(name, logits, labels)
    pieces = chunks_module._pieces
    monkeypatch.setattr(chunks_module, "_pieces", lambda function, vectors, size: pieces(function, vectors, 7))
    again, in_pieces = value_and_gradient(name, logits, labels)
    torch.testing.assert_close(value, again)
    torch.testing.assert_close(gradient, in_pieces)


@EVERY
def test_two_and_a_thousand_classes_and_missing_ones(name: str) -> None:
    for n_classes in (2, 1000):
        logits, _ = draw((50,), n_classes=n_classes)
        value, gradient = value_and_gradient(name, logits, torch.ones(50, dtype=torch.int64))
        assert value.isfinite()
        assert gradient.isfinite().all()


PRIMARY = [name for name, kind in LOSSES.items() if kind.role == "primary"]


@pytest.mark.parametrize("name", PRIMARY)
def test_a_primary_loss_alone_learns_to_classify(name: str) -> None:
    rng = np.random.default_rng(6)
    labels = torch.from_numpy(rng.integers(0, 3, 300))
    inputs = torch.from_numpy(rng.normal(0, 1, (300, 3))).float() + 2 * torch.eye(3)[labels]
    weights = torch.zeros(3, 3, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.1)
    loss = make_loss(name)
    for _ in range(60):
        optimizer.zero_grad()
        loss(inputs @ weights, labels).backward()
        optimizer.step()
    assert ((inputs @ weights).argmax(dim=1) == labels).float().mean() > 0.8


@pytest.mark.parametrize(
    ("name", "options"),
    [("mmce_m", {}), ("sb_ece", {}), ("sb_ece_lb", {}), ("kde_ce", {"kind": "top_label", "max_samples": 2000})],
)
def test_a_measure_of_calibration_is_smallest_where_the_model_is_calibrated(name: str, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    logits = torch.from_numpy(rng.normal(0, 1.5, (2000, 4)))
    reached = torch.softmax(logits, dim=1).cumsum(dim=1) < torch.from_numpy(rng.uniform(size=(2000, 1)))
    labels = reached.sum(dim=1).clamp_max(3)
    values = {scale: make_loss(name, **options)(scale * logits, labels).item() for scale in (0.5, 1.0, 2.0)}
    assert min(values, key=values.__getitem__) == 1.0


def test_composite_adds_its_parts() -> None:
    logits, labels = draw((2, 30))
    parts = [make_loss("focal")(logits, labels), make_loss("mmce_w")(logits, labels)]
    assert Composite(make_loss("focal"), make_loss("mmce_w"), 2.5)(logits, labels) == parts[0] + 2.5 * parts[1]
    assert Composite(make_loss("focal"), make_loss("mmce_w"), 0)(logits, labels) == parts[0]
    with pytest.raises(ParameterError, match="beta"):
        Composite(make_loss("focal"), make_loss("mmce_w"), -1)


def test_kde_draws_other_voxels_each_step_and_the_same_ones_in_eval_mode() -> None:
    logits, labels = draw((2, 4000))
    loss = make_loss("kde_ce", bandwidth=0.05, max_samples=64)
    values = [loss(logits, labels).item() for _ in range(3)]
    assert len(set(values)) == 3
    again = make_loss("kde_ce", bandwidth=0.05, max_samples=64)
    assert [again(logits, labels).item() for _ in range(3)] == values
    assert make_loss("kde_ce", bandwidth=0.05, max_samples=64, seed=1)(logits, labels).item() != values[0]
    loss.eval()
    assert loss(logits, labels) == loss(logits, labels)


def test_the_subsample_has_no_voxel_twice_and_reaches_every_stretch() -> None:
    from segcal.classification.losses.subsample import stratified_indices

    for n in (513, 1000, 4_194_304):
        index = stratified_indices(n, 512, seed=3, draw=1, device=torch.device("cpu"))
        assert len(index.unique()) == 512
        assert index.min() >= 0
        assert index.max() < n
        assert (torch.diff(index) <= 2 * n / 512 + 2).all()


def test_regions_are_binary_problems_of_their_own() -> None:
    rng = np.random.default_rng(8)
    logits = torch.from_numpy(rng.normal(0, 2, (2, 3, 7, 5)))
    target = torch.from_numpy(rng.integers(0, 2, (2, 4, 7, 5)))
    plain = BinaryRegions(make_loss("ce"))(logits, target[:, :3])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, target[:, :3].double())
    torch.testing.assert_close(plain, expected)

    masked = BinaryRegions(make_loss("ce"), has_ignore_channel=True)(logits, target.bool())
    keep = (target[:, 3:] == 0).expand(-1, 3, -1, -1)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits[keep], target[:, :3][keep].double())
    torch.testing.assert_close(masked, expected)
    with pytest.raises(DataError, match="one channel per region and one to ignore"):
        BinaryRegions(make_loss("ce"), has_ignore_channel=True)(logits, target[:, :3])


def test_wrong_calls_say_what_is_expected() -> None:
    logits, labels = draw((2, 6))
    with pytest.raises(UsageError, match=r"loss 'fokal' does not exist; expected one of ce, focal"):
        make_loss("fokal")
    with pytest.raises(ParameterError, match=r"loss focal: .*gama"):
        make_loss("focal", gama=2)
    with pytest.raises(DataError, match=r"labels from 0 to 3 for 3 classes; expected 0 to 2, or -100"):
        make_loss("ce")(logits, torch.full_like(labels, 3).index_fill(1, torch.tensor([0]), 0))
    with pytest.raises(DataError, match=r"do not belong to logits"):
        make_loss("ce")(logits, labels[:, :5])
    with pytest.raises(DataError, match="fractions"):
        make_loss("ce")(logits, labels + 0.5)
    with pytest.raises(DataError, match="one class"):
        make_loss("ce")(logits[:, :1], labels)
    with pytest.raises(DataError, match="floating"):
        make_loss("ce")(logits.long(), labels)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("focal", {"gamma": -1}),
        ("focal", {"gamma": float("nan")}),
        ("aurc", {"score": "confidence"}),
        ("aurc", {"estimator": "sele"}),
        ("au_p", {"coverage": 0}),
        ("au_p", {"nu": 0}),
        ("au_p", {"n_bins": 0}),
        ("mmce_w", {"bandwidth": 0.001}),
        ("kde_ce", {"p": 0.5}),
        ("kde_ce", {"kind": "label"}),
        ("kde_ce", {"bandwidth": 0}),
        ("kde_xe", {"max_samples": 1}),
        ("avuc", {"kappa": -1}),
        ("s_avuc", {"kappa": 1}),
        ("s_avuc", {"temperature": 0}),
        ("sb_ece", {"n_bins": 0}),
        ("sb_ece", {"temperature": 0}),
        ("sb_ece_lb", {"p": 0.9}),
    ],
)
def test_parameters_out_of_range_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=r"expected|must be|is a"):
        make_loss(name, **options)
