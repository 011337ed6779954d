"""The calibrator file is shared with the core, in both directions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import segcal
from segcal.calibrator_info import CalibratorInfo
from segcal.classification import Samples, files, fit, load
from segcal.classification.base import RowMethod
from segcal.errors import FileFormatError, MissingFileError, ParameterError, UsageError
from tests.classification.feature_rows import draw_rows as draw_features
from tests.classification.rows import draw_rows, nll

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "cms_ap_v1.safetensors"
DATA = draw_rows(300, 3)


def metadata(path: Path) -> dict[str, object]:
    with safe_open(path, framework="pt") as file:
        values: dict[str, object] = json.loads(file.metadata()["segcal"])
        return values


def test_a_file_of_segcal_fit_can_be_applied_to_rows() -> None:
    core = segcal.load_calibrator(GOLDEN)
    rows = draw_rows(50, len(core.info.classes))
    expected = core.probabilities(rows.logits, class_axis=1)
    assert torch.equal(load(GOLDEN).probabilities(rows), expected)


def test_files_of_the_core_carry_no_settings_and_those_of_classifiers_do(tmp_path: Path) -> None:
    assert "settings" not in metadata(GOLDEN)
    assert "settings" not in json.loads(segcal.load_calibrator(GOLDEN).info.to_json())
    fit("histogram", DATA, bins=7).save(tmp_path / "c.safetensors")
    assert metadata(tmp_path / "c.safetensors")["settings"] == {"bins": 7}


def test_the_file_says_how_it_was_made() -> None:
    made = fit("dc", DATA, classes=("a", "b", "c"), seed=4, trials=2)
    info = made.info
    assert (info.method, info.classes, info.kind, info.seed) == ("dc", ("a", "b", "c"), "logits", 4)
    assert info.lambda_ is not None
    assert info.mu is not None
    assert info.validation_nll is not None
    assert info.fit_nll == pytest.approx(nll(made.probabilities(DATA), DATA.known_labels))
    assert info.settings == {"trials": 2}


ONE_VS_REST = ("platt", "beta", "isotonic", "histogram")


@pytest.mark.parametrize("method", ONE_VS_REST)
def test_a_fit_for_every_class_says_which_classes_have_too_few_rows(method: str) -> None:
    labels = torch.tensor([0] * 10 + [1] * 9 + [2], device="cpu")
    rows = Samples.of(draw_rows(20, 3).logits, labels)
    assert fit(method, rows, classes=("a", "b", "c")).info.warnings == (
        "fewer than 10 rows are labelled b (9), c (1): what is fitted for such a class is mostly chance",
    )
    assert "0 (1), 1 (1), 2 (1)" in fit(method, rows.rows(torch.tensor([0, 10, 19], device="cpu"))).info.warnings[0]
    assert fit(method, DATA).info.warnings == ()


@pytest.mark.parametrize("method", ["ts", "ts_hb_ece", "meta_mis", "vs", *ONE_VS_REST])
def test_a_fit_says_which_classes_have_no_labelled_row(method: str) -> None:
    rows = draw_rows(600, 4)
    kept = rows.rows((rows.known_labels == 0) | (rows.known_labels == 3))
    found = fit(method, kept, classes=("a", "b", "c", "d")).info.warnings
    assert "no row of the fit is labelled b, c" in found
    assert not any("fewer than 10 rows" in text for text in found)


def test_one_temperature_for_all_classes_does_not_mind_that_a_class_is_rare() -> None:
    labels = torch.arange(600, device="cpu") // 300
    labels[:3] = 2
    rows = Samples.of(draw_rows(600, 3).logits, labels)
    for method in ("identity", "ts", "ts_sb_ece", "meta_mis"):
        assert not any("fewer than 10 rows" in text for text in fit(method, rows).info.warnings)
    assert any("labelled 2 (3)" in text for text in fit("vs", rows).info.warnings)


def test_what_is_no_classifiers_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no such calibrator"):
        load(tmp_path / "none.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    with pytest.raises(FileFormatError, match="not a calibrator file"):
        load(tmp_path / "junk.safetensors")
    info = CalibratorInfo(
        method="lts",
        classes=("a", "b"),
        pooling="logits",
        kind="logits",
        translation_invariant=False,
        preserves="order",
    )
    save_file({"x": torch.zeros(1, device="cpu")}, tmp_path / "lts.safetensors", metadata={"segcal": info.to_json()})
    with pytest.raises(FileFormatError, match="method `lts` cannot be applied to rows"):
        load(tmp_path / "lts.safetensors")


def test_parameters_of_other_classes_than_the_metadata_names_are_refused(tmp_path: Path) -> None:
    made = fit("platt", DATA)
    info = made.info.model_copy(update={"classes": ("a", "b")})
    save_file(made.method.tensors(), tmp_path / "c.safetensors", metadata={"segcal": info.to_json()})
    with pytest.raises(FileFormatError, match="parameters for 3 classes, the metadata names 2"):
        load(tmp_path / "c.safetensors")


@pytest.mark.parametrize("classes", [("a", "b"), ("a", "b", "b")])
def test_class_names_must_be_one_each(classes: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="one each"):
        fit("ts", DATA, classes=classes)


def test_a_misspelt_method_is_told_its_neighbour() -> None:
    with pytest.raises(UsageError, match="did you mean `platt`"):
        fit("plat", DATA)


@pytest.mark.parametrize("name", ["lenet5_cifar10", "wideresnet_cifar10", "wideresnet_cifar100"])
def test_real_classifiers_are_better_calibrated_on_the_other_half(classifiers: Path, name: str) -> None:
    data = np.load(classifiers / f"{name}.npz")
    rows = type(DATA).of(torch.tensor(data["probabilities"]), torch.tensor(data["labels"]), kind="probabilities")
    train, test = rows.rows(torch.arange(0, 10_000, 2)), rows.rows(torch.arange(1, 10_000, 2))
    before = nll(torch.softmax(test.logits, 1), test.known_labels)
    for method in ("ts", "ets", "vs"):
        assert nll(fit(method, train).probabilities(test), test.known_labels) < before - 0.005


@pytest.mark.parametrize("method", ["dc", "isotonic", "local_nets"])
def test_a_method_never_sees_more_rows_at_once_than_memory_bears(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = draw_features(n=90)
    made = fit(method, rows)
    expected, seen = made.method.probabilities(rows), []
    plain = type(made.method).probabilities

    def watched(self: RowMethod, samples: Samples) -> torch.Tensor:
        seen.append(samples.n_rows)
        return plain(self, samples)

    monkeypatch.setattr(type(made.method), "probabilities", watched)
    monkeypatch.setattr(files, "NUMBERS_AT_ONCE", 40 * (3 + 8) + 5)
    found = made.probabilities(rows)
    assert seen == [40, 40, 10]
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("histogram", {"bins": 1e9}, "histogram: bins must be a whole number, got 1000000000.0"),
        ("histogram", {"bins": float("nan")}, "histogram: bins must be a whole number, got nan"),
        ("ts_sb_ece", {"bins": "many"}, "ts_sb_ece: bins must be a whole number, got 'many'"),
        ("dc", {"lambda_": float("inf")}, "dc: lambda must be finite, got inf"),
        ("dc", {"mu": float("inf")}, "dc: mu must be finite, got inf"),
    ],
)
def test_a_setting_that_is_no_number_of_its_kind_is_named(method: str, settings: dict[str, Any], words: str) -> None:
    samples = Samples.of(torch.eye(4).double(), torch.arange(4), kind="logits")
    with pytest.raises(ParameterError, match=re.escape(words)):
        fit(method, samples, **settings)
