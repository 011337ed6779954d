"""What every method of the registry promises; a new method is picked up by itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import segcal
from segcal.calibrators import CALIBRATORS
from segcal.classification import METHODS, FittedMethod, Samples, fit, load
from segcal.classification.files import settings_of
from segcal.errors import FileFormatError, MismatchError, ParameterError, SegcalError, UsageError
from tests.classification.rows import draw_rows, nll

NAMES = list(METHODS)
N_CLASSES, N_FEATURES = 4, 8
QUICK = {"trials": 2, "steps": 30, "epochs": 2, "max_steps": 40, "n_codes": 16, "n_slots": 4}
"""Settings that make a fit short; a method takes those it has."""


def quick(name: str) -> dict[str, int]:
    return {key: value for key, value in QUICK.items() if key in settings_of(METHODS[name])}


@cache
def rows(n_rows: int = 600, seed: int = 0, n_classes: int = N_CLASSES) -> Samples:
    return draw_rows(n_rows, n_classes, seed=seed, n_features=N_FEATURES)


@cache
def fitted(name: str, seed: int = 0) -> FittedMethod:
    return fit(name, rows(), seed=seed, **quick(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_registry_key_is_the_name_and_the_promises_are_declared(name: str) -> None:
    method = METHODS[name]
    assert method.name == name
    assert isinstance(method.translation_invariant, bool)
    assert method.preserves in (None, "argmax", "order")


def test_every_voxel_wise_calibrator_of_the_core_is_there() -> None:
    assert {name for name, method in CALIBRATORS.items() if not method.spatial} <= set(METHODS)


@pytest.mark.parametrize("name", NAMES)
def test_rows_sum_to_one_in_float64(name: str) -> None:
    test = rows(300, 1)
    probs = fitted(name).probabilities(test)
    assert probs.dtype == torch.float64
    assert probs.shape == (300, N_CLASSES)
    assert bool((probs >= 0).all())
    assert float((probs.sum(1) - 1).abs().max()) < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_a_fit_lowers_the_nll_of_an_overconfident_classifier(name: str) -> None:
    if name in ("identity", "meta_acc", "meta_mis"):
        pytest.skip("gives rows up, or changes nothing")
    train, test = rows(3000), rows(2000, 1)
    if METHODS[name].needs_features:
        assert np.isfinite(nll(fitted(name).probabilities(test), test.known_labels))
        return
    before = nll(torch.softmax(test.logits, 1), test.known_labels)
    found = fit(name, train, **quick(name)).probabilities(test)
    assert nll(found, test.known_labels) < before - 0.05


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    test = rows(200, 1)
    method = fitted(name).method
    whole = method.probabilities(test)
    order = torch.as_tensor(np.random.default_rng(0).permutation(200))
    parts = torch.cat([method.probabilities(test.rows(part)) for part in order.split(37)])
    torch.testing.assert_close(parts, whole[order], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load_give_the_same_bytes_and_probabilities(name: str, tmp_path: Path) -> None:
    made = fitted(name)
    made.save(tmp_path / "cal.safetensors")
    again = load(tmp_path / "cal.safetensors")
    assert again.content == made.content
    assert again.info == made.info
    test = rows(300, 1)
    assert torch.equal(again.probabilities(test), made.probabilities(test))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_bytes(name: str) -> None:
    assert fit(name, rows(), seed=0, **quick(name)).content == fitted(name).content


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_the_rows_does_not_matter_unless_declared(name: str) -> None:
    if METHODS[name].order_matters:
        pytest.skip("draws rows by their position, and says so")
    order = torch.as_tensor(np.random.default_rng(5).permutation(600))
    test = rows(300, 1)
    other = fit(name, rows().rows(order), **quick(name))
    torch.testing.assert_close(other.probabilities(test), fitted(name).probabilities(test), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_the_promise_about_the_decision_is_kept(name: str) -> None:
    test = rows(2000, 2)
    probs = fitted(name).probabilities(test)
    preserves = METHODS[name].preserves
    if preserves is None:
        pytest.skip("promises nothing")
    assert torch.equal(probs.argmax(1), test.decision)
    if preserves == "order":
        ranked = probs.gather(1, test.logits.argsort(1, descending=True))
        assert bool((ranked.diff(dim=1) <= 1e-15).all())


@pytest.mark.parametrize("name", NAMES)
def test_translation_invariance_is_as_declared(name: str) -> None:
    test = rows(300, 1)
    shift = torch.as_tensor(np.random.default_rng(0).normal(0, 5, (300, 1)))
    moved = Samples.of(test.logits + shift, None, test.features)
    apart = float((fitted(name).probabilities(moved) - fitted(name).probabilities(test)).abs().max())
    if METHODS[name].translation_invariant:
        assert apart < 1e-9
    else:
        assert apart > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_the_input_is_not_changed(name: str) -> None:
    data = draw_rows(400, N_CLASSES, n_features=N_FEATURES)
    before = [data.logits.clone(), data.known_labels.clone(), data.known_features.clone()]
    fit(name, data, **quick(name)).probabilities(data)
    for kept, now in zip(before, (data.logits, data.known_labels, data.known_features), strict=True):
        assert torch.equal(kept, now)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["two_classes", "few_rows", "missing_class", "constant", "duplicates", "always_right"])
def test_awkward_rows_end_in_finite_probabilities(name: str, kind: str) -> None:
    if kind == "two_classes":
        data = draw_rows(400, 2, n_features=N_FEATURES)
    elif kind == "few_rows":
        data = draw_rows(50, N_CLASSES, n_features=N_FEATURES)
    else:
        data = draw_rows(300, N_CLASSES, n_features=N_FEATURES)
        logits, labels = data.logits, data.known_labels
        if kind == "missing_class":
            labels = torch.where(labels == 2, 0, labels)
        elif kind == "constant":
            logits = torch.full_like(logits, 1.5)
        elif kind == "duplicates":
            logits, labels = logits[:3].repeat(100, 1), labels[:3].repeat(100)
        else:
            labels = logits.argmax(1)
        data = Samples.of(logits, labels, data.features)
    probs = fit(name, data, **quick(name)).probabilities(data)
    assert bool(torch.isfinite(probs).all())
    assert float((probs.sum(1) - 1).abs().max()) < 1e-9
    assert np.isfinite(nll(probs, data.known_labels))


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_and_no_labels_are_clear_errors(name: str) -> None:
    empty = rows().rows(torch.zeros(0, dtype=torch.int64, device="cpu"))
    unlabelled = Samples.of(rows().logits, None, rows().features)
    for data in (empty, unlabelled):
        with pytest.raises(SegcalError, match=r"no row|no labels"):
            fit(name, data)


@pytest.mark.parametrize("name", NAMES)
def test_other_classes_are_refused_naming_the_field(name: str) -> None:
    with pytest.raises(MismatchError, match="classes differ"):
        fitted(name).probabilities(draw_rows(10, N_CLASSES + 1, n_features=N_FEATURES))
    with pytest.raises(MismatchError, match="classes differ"):
        fitted(name).probabilities(rows(), classes=("a", "b", "c", "d"))


@pytest.mark.parametrize("name", NAMES)
def test_the_other_kind_is_refused_unless_translation_invariant(name: str) -> None:
    test = rows(50, 1)
    as_probs = Samples.of(torch.softmax(test.logits, 1), None, test.features, kind="probabilities")
    if METHODS[name].translation_invariant:
        apart = fitted(name).probabilities(as_probs) - fitted(name).probabilities(test)
        assert float(apart.abs().max()) < 1e-9
    else:
        with pytest.raises(MismatchError, match="kind differs"):
            fitted(name).probabilities(as_probs)


@pytest.mark.parametrize("name", NAMES)
def test_the_core_reads_what_it_knows_and_points_the_way_for_the_rest(name: str, tmp_path: Path) -> None:
    path = tmp_path / "cal.safetensors"
    fitted(name).save(path)
    if name not in CALIBRATORS:
        with pytest.raises(FileFormatError, match=r"segcal\.classification\.load"):
            segcal.load_calibrator(path)
        return
    test = rows(100, 1)
    found = segcal.load_calibrator(path).probabilities(test.logits, class_axis=1)
    assert torch.equal(found, fitted(name).probabilities(test))


@pytest.mark.parametrize("name", NAMES)
def test_missing_and_mangled_tensors_are_parameter_errors(name: str) -> None:
    tensors = fitted(name).method.tensors()
    for key in tensors:
        if METHODS[name].needs_features:
            continue  # a network may do without some of its parts
        with pytest.raises(ParameterError):
            METHODS[name].from_tensors({k: v for k, v in tensors.items() if k != key})
        with pytest.raises(ParameterError):
            METHODS[name].from_tensors({**tensors, key: torch.full_like(tensors[key], float("nan"))})


@pytest.mark.parametrize("name", NAMES)
def test_unknown_settings_are_named(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} has no setting `tials`"):
        fit(name, rows(), tials=3)
