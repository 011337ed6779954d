"""What every calibrator promises, checked over the registry: a new one is picked up by itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from segcal.calibrator_info import CalibratorInfo
from segcal.calibrators import CALIBRATORS, Calibrator, base
from segcal.calibrators.affine import AffineCalibrator
from segcal.chunks import chunk_budget
from segcal.errors import ParameterError
from segcal.fitted import FittedCalibrator, load_calibrator
from segcal.threads import one_thread
from tests.conformance.drawn import SPACE, VOLUMES, draw_calibrator, draw_volume

EVERY = pytest.mark.parametrize("name", list(CALIBRATORS))
BY_ROWS = pytest.mark.parametrize("name", [name for name, cls in CALIBRATORS.items() if not cls.spatial])
AFFINE = pytest.mark.parametrize(
    "name", [name for name, cls in CALIBRATORS.items() if issubclass(cls, AffineCalibrator)]
)
PRESERVING = pytest.mark.parametrize("name", [name for name, cls in CALIBRATORS.items() if cls.preserves])
CLASSES = pytest.mark.parametrize("n_classes", [2, 3, 5])

DTYPES = (torch.float16, torch.float32, torch.float64)
SUM_TOLERANCE = {torch.float16: 5e-3, torch.float32: 1e-5, torch.float64: 1e-12}

# SEG Table 2, optimised / identifiable, for C = 2 (RoadSeg), 5 (BraTS), 20 (Cityscapes); vs and identity are ours.
TABLE_2 = {
    "identity": [(0, 0), (0, 0), (0, 0)],
    "ts": [(1, 1), (1, 1), (1, 1)],
    "ets": [(4, 3), (4, 3), (4, 3)],
    "vs": [(4, 3), (10, 9), (40, 39)],
    "ms": [(6, 3), (30, 24), (420, 399)],
    "ms_c": [(5, 2), (26, 20), (401, 380)],
    "dc": [(6, 3), (30, 24), (420, 399)],
    "cdc": [(12, 6), (150, 120), (8400, 7980)],
    "cms_ap": [(10, 4), (130, 100), (8020, 7600)],
    "cms_op": [(10, 4), (130, 100), (8020, 7600)],
    "lts": [(357, 357), (882, 882), (3507, 3507)],
    "lts_ti": [(357, 357), (882, 882), (3507, 3507)],
}


@EVERY
def test_parameter_counts_are_those_of_table_2(name: str) -> None:
    assert [CALIBRATORS[name].parameter_counts(c) for c in (2, 5, 20)] == TABLE_2[name]


@EVERY
def test_the_registry_key_is_the_name(name: str) -> None:
    assert CALIBRATORS[name].name == name


@EVERY
@CLASSES
@pytest.mark.parametrize("kind", VOLUMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_is_a_distribution_of_the_same_shape_and_type(
    name: str, n_classes: int, kind: str, dtype: torch.dtype
) -> None:
    logits = draw_volume(kind, n_classes).to(dtype)
    before = logits.clone()
    decision = logits.argmax(0)
    for seed in range(2):
        calibrator = draw_calibrator(name, n_classes, seed)
        log_probs = calibrator.volume_log_probs(logits, decision)
        probs = calibrator.probabilities(logits, class_axis=0, decision=decision)

        assert log_probs.shape == probs.shape == logits.shape
        assert log_probs.dtype == probs.dtype == dtype
        assert not log_probs.isnan().any()
        if dtype != torch.float16:  # whose range ends at -65504
            assert log_probs.isfinite().all()
        assert ((probs >= 0) & (probs <= 1)).all()
        torch.testing.assert_close(
            probs.double().sum(0), torch.ones(SPACE, dtype=torch.float64), rtol=0, atol=SUM_TOLERANCE[dtype]
        )
    assert torch.equal(logits, before)
    assert torch.equal(decision, before.argmax(0))


@pytest.mark.parametrize("name", ["ts", "ets"])
def test_half_precision_logits_do_not_overflow_at_a_small_temperature(name: str) -> None:
    tensors = {"temperature": np.array([0.05]), "mixture": np.array([0.5, 0.3, 0.2])}
    calibrator = CALIBRATORS[name].from_tensors({key: torch.tensor(value) for key, value in tensors.items()})
    logits = draw_volume("huge", 3).half()  # 1e4 / 0.05 is beyond float16
    probs = calibrator.probabilities(logits, class_axis=0)
    expected = calibrator.probabilities(logits.double(), class_axis=0)
    torch.testing.assert_close(probs.double(), expected, rtol=0, atol=1e-3)


@EVERY
@CLASSES
@pytest.mark.parametrize("kind", VOLUMES)
def test_identity_changes_nothing(name: str, n_classes: int, kind: str) -> None:
    logits = draw_volume(kind, n_classes)
    probs = CALIBRATORS[name].identity(n_classes).volume_log_probs(logits).exp()
    # The cone maps keep an offset of 1e-6, so that a winner stays strictly ahead.
    torch.testing.assert_close(probs, torch.softmax(logits, 0), rtol=0, atol=3e-6 if "cms" in name else 1e-12)


@EVERY
@CLASSES
def test_parameters_survive_the_round_trip_bit_by_bit(name: str, n_classes: int, tmp_path: Path) -> None:
    calibrator = draw_calibrator(name, n_classes)
    info = CalibratorInfo(
        method=name,
        classes=tuple(f"class {k}" for k in range(n_classes)),
        pooling="logits",
        kind="logits",
        translation_invariant=calibrator.translation_invariant,
        preserves=calibrator.preserves,
    )
    path = tmp_path / "calibrator.safetensors"
    FittedCalibrator(calibrator, info).save(path)
    loaded = load_calibrator(path)

    assert loaded.info == info
    assert isinstance(loaded.calibrator, Calibrator)
    logits = draw_volume("random", n_classes).float()
    for copy in (type(calibrator).from_tensors(calibrator.tensors()), loaded.calibrator):
        assert type(copy) is type(calibrator)
        assert copy.n_classes in (None, n_classes)
        assert copy.tensors().keys() == calibrator.tensors().keys()
        for key, value in calibrator.tensors().items():
            assert value.dtype == torch.float64
            assert torch.equal(copy.tensors()[key], value)
        assert torch.equal(copy.volume_log_probs(logits), calibrator.volume_log_probs(logits))


@EVERY
def test_missing_misshapen_and_non_finite_parameters_are_refused(name: str) -> None:
    cls = CALIBRATORS[name]
    tensors = draw_calibrator(name, 3).tensors()
    for key, value in tensors.items():
        with pytest.raises(ParameterError, match=f"{name}.*{key}.*missing"):
            cls.from_tensors({k: v for k, v in tensors.items() if k != key})
        with pytest.raises(ParameterError, match=name):
            cls.from_tensors({**tensors, key: value[..., :-1]})
        with pytest.raises(ParameterError, match=f"{name}.*{key}.*not finite"):
            cls.from_tensors({**tensors, key: torch.full_like(value, torch.nan)})


@EVERY
def test_empty_misranked_and_complex_parameters_are_refused(name: str) -> None:
    cls = CALIBRATORS[name]
    tensors = draw_calibrator(name, 3).tensors()
    if tensors:
        with pytest.raises(ParameterError, match=name):  # all of them, so that no two shapes disagree
            cls.from_tensors({key: value[(slice(0),) * value.ndim] for key, value in tensors.items()})
    for key, value in tensors.items():
        empty_on_an_axis = [value.narrow(axis, 0, 0) for axis in range(value.ndim)]
        for wrong in (value[None], value.flatten()[0], value.to(torch.complex128), *empty_on_an_axis):
            with pytest.raises(ParameterError, match=f"{name}.*parameter"):
                cls.from_tensors({**tensors, key: wrong})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("ts", "temperature", [0.0]),
        ("ts", "temperature", [-1.0]),
        ("ets", "temperature", [0.0]),
        ("ets", "mixture", [0.5, 0.6, -0.1]),
        ("ets", "mixture", [0.5, 0.4, 0.2]),
        ("ms_c", "W", [[1.0, 0.0], [0.0, 1.1]]),
        ("cms_ap", "A", [[[1.0]], [[-1e-9]]]),
        ("cms_op", "beta", [[1e-6], [-1e-6]]),
    ],
)
def test_parameters_that_would_break_a_promise_are_refused(name: str, key: str, value: list[Any]) -> None:
    tensors = {**draw_calibrator(name, 2).tensors(), key: torch.tensor(value, dtype=torch.float64)}
    with pytest.raises(ParameterError, match=name):
        CALIBRATORS[name].from_tensors(tensors)


def shifted_apart(name: str, n_classes: int, dtype: torch.dtype, size: float) -> float:
    """Largest change of a probability when every voxel's logits get a random common shift."""
    largest = 0.0
    for seed in range(3):
        calibrator = draw_calibrator(name, n_classes, seed)
        logits = draw_volume("random", n_classes, seed).to(dtype)
        shift = torch.tensor(np.random.default_rng(seed).normal(0, size, SPACE)).to(dtype)
        apart = calibrator.volume_log_probs(logits + shift).exp() - calibrator.volume_log_probs(logits).exp()
        largest = max(largest, float(apart.abs().max()))
    return largest


@EVERY
@CLASSES
def test_translation_invariance_is_as_declared(name: str, n_classes: int) -> None:
    if CALIBRATORS[name].translation_invariant:
        assert shifted_apart(name, n_classes, torch.float64, size=100.0) <= 1e-9
        # A logit of 32 is known to 2e-6 in float32; maps of this size amplify that to a few times 1e-5 at most.
        assert shifted_apart(name, n_classes, torch.float32, size=8.0) <= 1e-4
    else:
        assert shifted_apart(name, n_classes, torch.float64, size=8.0) > 0.05


@PRESERVING
@CLASSES
@pytest.mark.parametrize("kind", VOLUMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_preserving_methods_keep_the_argmax(name: str, n_classes: int, kind: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        logits = draw_volume(kind, n_classes, seed).to(dtype)
        probs = draw_calibrator(name, n_classes, seed).probabilities(logits, class_axis=0)
        assert torch.equal(probs.argmax(0), logits.argmax(0))


@PRESERVING
@CLASSES
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_handed_in_decision_is_kept_at_near_ties(name: str, n_classes: int, dtype: torch.dtype) -> None:
    logits = draw_volume("near_ties", n_classes, 1).to(dtype)
    deployed = logits.half().argmax(0)  # what a half-precision ensemble decided
    if dtype != torch.float16:
        assert (deployed != logits.argmax(0)).any()
    for seed in range(3):
        probs = draw_calibrator(name, n_classes, seed).probabilities(logits, class_axis=0, decision=deployed)
        assert torch.equal(probs.argmax(0), deployed)
        if "cms" in name:  # their maps follow the decision, so the repair has rounding errors to mend only
            total = probs.double().sum(0)
            torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=SUM_TOLERANCE[dtype])


@PRESERVING
@CLASSES
@pytest.mark.parametrize("kind", VOLUMES)
def test_the_map_itself_keeps_what_it_declares(name: str, n_classes: int, kind: str) -> None:
    for seed in range(3):
        logits = draw_volume(kind, n_classes, seed)
        log_probs = draw_calibrator(name, n_classes, seed).volume_log_probs(logits)
        for first, second in _pairs(n_classes):
            ahead = logits[first] > logits[second]
            if CALIBRATORS[name].preserves == "argmax":
                ahead &= logits.argmax(0) == first
            # Up to ties: rounding may bring two classes together, 1e-12 of their size apart.
            room = 1e-12 * (1 + log_probs[second].abs())
            assert (log_probs[first] >= log_probs[second] - room)[ahead].all()


@pytest.mark.parametrize("name", ["identity", "ts", "ets", "lts", "lts_ti"])
def test_a_temperature_keeps_the_order_of_neighbours_in_single_precision(name: str) -> None:
    """The second class takes every distance, the third is one step of float32 behind it."""
    second = -torch.rand(1, 30, 90, generator=torch.Generator().manual_seed(0)) * 8
    third = torch.nextafter(second, torch.tensor(-torch.inf))
    logits = torch.stack([torch.zeros_like(second), second, third])
    calibrator = draw_calibrator(name, 3)
    for found in (calibrator.volume_probs(logits), calibrator.volume_log_probs(logits)):
        assert (found[1] >= found[2]).all()


def _pairs(n_classes: int) -> Iterator[tuple[int, int]]:
    return ((i, j) for i in range(n_classes) for j in range(n_classes) if i != j)


@pytest.mark.parametrize("name", [name for name, cls in CALIBRATORS.items() if cls.preserves is None])
def test_methods_that_declare_no_preservation_do_flip(name: str) -> None:
    logits = draw_volume("random", 3)
    probs = draw_calibrator(name, 3).probabilities(logits, class_axis=0)
    assert (probs.argmax(0) != logits.argmax(0)).any()


def test_keeping_the_argmax_is_less_than_keeping_the_order() -> None:
    logits = draw_volume("random", 5)
    log_probs = draw_calibrator("cms_ap", 5).volume_log_probs(logits)
    assert (log_probs.argsort(0) != logits.argsort(0)).any()


@BY_ROWS
@CLASSES
def test_a_volume_is_its_rows(name: str, n_classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "chunk_voxels", lambda _: 17)  # 84 voxels: four whole chunks and a part
    calibrator = draw_calibrator(name, n_classes)
    logits = draw_volume("random", n_classes)
    decision = logits[:2].argmax(0)
    volume = calibrator.volume_log_probs(logits, decision)
    rows, winners = logits.reshape(n_classes, -1).T, decision.reshape(-1)
    one_by_one = [calibrator.log_probs(rows[i : i + 1], winners[i : i + 1])[0] for i in range(len(rows))]
    torch.testing.assert_close(volume.reshape(n_classes, -1).T, torch.stack(one_by_one), rtol=1e-13, atol=1e-13)


@EVERY
@pytest.mark.parametrize("class_axis", [0, 1, -1])
def test_the_class_axis_may_be_anywhere_and_arrays_stay_arrays(name: str, class_axis: int) -> None:
    calibrator = draw_calibrator(name, 3)
    logits = draw_volume("random", 3).float()
    decision = logits[:2].argmax(0)
    expected = calibrator.probabilities(logits, class_axis=0, decision=decision)
    moved = torch.movedim(logits, 0, class_axis)

    given_tensor = calibrator.probabilities(moved, class_axis=class_axis, decision=decision)
    assert isinstance(given_tensor, Tensor)
    assert torch.equal(torch.movedim(given_tensor, class_axis, 0), expected)
    given_array = calibrator.probabilities(moved.numpy(), class_axis=class_axis, decision=decision.numpy())
    assert isinstance(given_array, np.ndarray)
    assert given_array.dtype == np.float32
    np.testing.assert_array_equal(np.moveaxis(given_array, class_axis, 0), expected.numpy())


@BY_ROWS
def test_plain_rows_are_welcome(name: str) -> None:
    calibrator = draw_calibrator(name, 3)
    rows = draw_volume("random", 3).reshape(3, -1).T
    expected = calibrator.probabilities(rows.T, class_axis=0)
    assert torch.equal(calibrator.probabilities(rows, class_axis=1).T, expected)


@pytest.mark.parametrize("name", [name for name, cls in CALIBRATORS.items() if cls.spatial])
def test_spatial_methods_refuse_plain_rows(name: str) -> None:
    with pytest.raises(ParameterError, match=r"\(C, z, y, x\)"):
        draw_calibrator(name, 3).probabilities(torch.zeros(10, 3), class_axis=1)


@EVERY
def test_arrays_that_torch_cannot_share_give_the_same(name: str) -> None:
    calibrator = draw_calibrator(name, 3)
    plain = draw_volume("random", 3).float().numpy()
    expected = calibrator.probabilities(plain, class_axis=0)
    read_only = plain.copy()
    read_only.flags.writeable = False
    flipped = np.ascontiguousarray(plain[:, :, ::-1])[:, :, ::-1]
    for array in (read_only, flipped, plain.astype(">f4")):
        np.testing.assert_array_equal(calibrator.probabilities(array, class_axis=0), expected)


@EVERY
def test_wrong_input_is_refused_and_named(name: str) -> None:
    calibrator = draw_calibrator(name, 3)
    logits = draw_volume("random", 3).float()
    with pytest.raises(ParameterError, match=f"{name}.*floating point.*int64"):
        calibrator.probabilities(logits.long(), class_axis=0)
    if calibrator.n_classes is not None:
        with pytest.raises(ParameterError, match=r"fitted for 3 classes.*axis 1.*class_axis"):
            calibrator.probabilities(logits, class_axis=1)
    decision = logits.argmax(0)
    with pytest.raises(ParameterError, match=r"decision must be whole numbers of shape \(2, 6, 7\)"):
        calibrator.probabilities(logits, class_axis=0, decision=decision.transpose(1, 2))
    with pytest.raises(ParameterError, match="whole numbers"):
        calibrator.probabilities(logits, class_axis=0, decision=decision.float())
    for wrong in (-1, 3):
        with pytest.raises(ParameterError, match="class indices are 0 to 2"):
            calibrator.probabilities(logits, class_axis=0, decision=decision.where(decision != 1, wrong))
    labels = decision.numpy().astype(np.uint8)  # as nnU-Net stores a segmentation
    expected = calibrator.probabilities(logits, class_axis=0, decision=decision)
    np.testing.assert_array_equal(calibrator.probabilities(logits.numpy(), class_axis=0, decision=labels), expected)


@EVERY
@pytest.mark.parametrize("n_bytes", [1, 1 << 16, 1 << 30])
def test_no_memory_for_chunks_changes_a_bit_of_a_volume(name: str, n_bytes: int) -> None:
    calibrator = draw_calibrator(name, 5)
    logits = torch.randn(5, 3, 61, 83, generator=torch.Generator().manual_seed(4)) * 3
    decision = logits.argmax(0)
    with one_thread(), chunk_budget(n_bytes):
        cut = calibrator.volume_probs(logits, decision)
    with one_thread():
        assert torch.equal(cut, calibrator.volume_probs(logits, decision))


MANY_CLASSES = [("ms", 80), ("dc", 80)]  # a library multiplies matrices of this size by other routines


@pytest.mark.parametrize(("name", "n_classes"), [*product(CALIBRATORS, [2, 5, 16, 20]), *MANY_CLASSES])
def test_a_chunk_that_ends_with_one_voxel_has_the_bits_of_a_whole_volume(name: str, n_classes: int) -> None:
    calibrator = draw_calibrator(name, n_classes)
    logits = torch.randn(n_classes, 1, 25, 41, generator=torch.Generator().manual_seed(4)) * 3
    decision = logits.argmax(0)
    with one_thread():
        whole = calibrator.volume_probs(logits, decision)
        with chunk_budget(1):
            cut = calibrator.volume_probs(logits, decision)
    assert torch.equal(cut, whole)


@AFFINE
@pytest.mark.parametrize("n_classes", [2, 3, 5, 17, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_voxel_alone_has_the_bits_it_has_beside_another(name: str, n_classes: int, dtype: torch.dtype) -> None:
    calibrator = draw_calibrator(name, n_classes)
    assert isinstance(calibrator, AffineCalibrator)
    logits = torch.randn(n_classes, 40, generator=torch.Generator().manual_seed(5), dtype=dtype) * 3
    decision = torch.zeros(2, dtype=torch.int64)
    with one_thread():
        for first in range(0, 40, 2):
            pair = logits[:, first : first + 2].contiguous()
            alone = calibrator.voxel_log_probs(pair[:, :1], decision[:1])
            assert torch.equal(alone, calibrator.voxel_log_probs(pair, decision)[:, :1])


@AFFINE
def test_a_fitting_problem_keeps_no_zeros(name: str) -> None:
    """Every chunk of a map multiplies with the embedding, which with 40 classes can hold 2.4 million zeros."""
    method = CALIBRATORS[name]
    assert issubclass(method, AffineCalibrator)
    design = method.design(20)
    for matrix in (design.embed, design.off_diagonal, design.bias, design.ridge):
        assert matrix.nnz == matrix.count_nonzero()
