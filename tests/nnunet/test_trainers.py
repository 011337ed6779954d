"""nnU-Net's own trainer with segcal's losses: real plans, a real network, real steps on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("nnunetv2", reason="the extra `nnunet` is not installed")

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.find_class_by_name import recursive_find_python_class

from segcal.classification.losses import LOSSES, BinaryRegions, make_loss
from segcal.errors import ParameterError, UsageError
from segcal.nnunet.trainers import FOLDER, segcal_loss
from segcal.nnunet.trainers.segcal_loss import READY_MADE, nnUNetTrainerSegcalLoss
from tests.nnunet.untrained import write_model, write_region_model

pytestmark = pytest.mark.nnunet


def make_trainer(
    kind: type[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    regions: bool = False,
    ignore: bool = False,
    initialize: bool = True,
) -> Any:
    """The trainer as `nnUNetv2_train` builds it, without the look-up by name (which imports torchvision)."""
    model = (write_region_model if regions else write_model)(tmp_path / "model")
    plans, dataset = (json.loads((model / name).read_text()) for name in ("plans.json", "dataset.json"))
    if ignore and not regions:
        dataset["labels"]["ignore"] = 3
    preprocessed = tmp_path / "preprocessed" / plans["dataset_name"] / "tiny"
    preprocessed.mkdir(parents=True)
    (preprocessed / "case_0.b2nd").touch()  # nnU-Net looks at the ending to choose a reader
    monkeypatch.setenv("nnUNet_preprocessed", str(tmp_path / "preprocessed"))
    monkeypatch.setenv("nnUNet_results", str(tmp_path / "results"))
    plans["continue_training"] = False
    torch.manual_seed(0)
    trainer = kind(plans, "tiny", 0, dataset, torch.device("cpu"))
    if initialize:
        trainer.initialize()
    return trainer


def draw_batch(trainer: Any, seed: int = 0) -> dict[str, Any]:
    """An image whose intensity says the class, and targets at every resolution of the deep supervision."""
    rng = np.random.default_rng(seed)
    size = trainer.configuration_manager.patch_size
    regions, ignore = trainer.label_manager.has_regions, trainer.label_manager.has_ignore_label
    shape = (2, 1, *size)
    labels = torch.from_numpy(rng.integers(0, 3, [2, 1, *(s // 4 for s in size)]))
    for axis, _ in enumerate(size):
        labels = labels.repeat_interleave(4, dim=axis + 2)
    assert tuple(labels.shape) == shape
    noise = torch.from_numpy(rng.normal(0, 0.3, (2, trainer.num_input_channels, *size))).float()
    if ignore:
        labels = labels.masked_fill(torch.from_numpy(rng.uniform(size=shape) < 0.3), 3)
    target = labels
    if regions:
        target = torch.cat([(labels == 1) | (labels == 2), labels == 2, *([labels == 3] if ignore else [])], dim=1)
    scales = trainer._get_deep_supervision_scales()
    targets = []
    for scale in scales:
        steps = [slice(None, None, round(1 / s)) for s in scale]
        targets.append(target[(slice(None), slice(None), *steps)].to(torch.int16))
    return {"data": labels.float() + noise, "target": targets}


def test_nnunet_finds_the_ready_made_trainers_in_the_folder() -> None:
    """The same call as nnU-Net's look-up makes for each path of `nnUNet_extTrainer`."""
    assert {name.removeprefix("nnUNetTrainerSegcal_") for name in READY_MADE} == {*LOSSES} - {"ce"}
    assert all(getattr(segcal_loss, name) is kind for name, kind in READY_MADE.items())
    for name in ("nnUNetTrainerSegcalLoss", "nnUNetTrainerSegcal_dual_focal", "nnUNetTrainerSegcal_sb_ece_lb"):
        found = recursive_find_python_class(
            FOLDER, name, None, base_folder=FOLDER, cleanup_imports_from_base_folder=True
        )
        assert found is not None
        assert found.__name__ == name
        assert issubclass(found, nnUNetTrainer)


def test_a_class_of_three_lines_in_a_folder_of_ones_own_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_trainers.py").write_text(
        "from segcal.nnunet.trainers.segcal_loss import nnUNetTrainerSegcalLoss\n\n\n"
        "class nnUNetTrainerFocalMMCE(nnUNetTrainerSegcalLoss):\n"
        '    segcal_primary, segcal_primary_options = "focal", {"gamma": 2.0}\n'
        '    segcal_secondary, segcal_beta = "mmce_w", 0.5\n'
    )
    found = recursive_find_python_class(str(tmp_path), "nnUNetTrainerFocalMMCE", None, base_folder=str(tmp_path))
    assert issubclass(found, nnUNetTrainerSegcalLoss)


@pytest.mark.parametrize("name", ["dual_focal", "au_p", "kde_xe", "mmce_w", "s_avuc", "sb_ece_lb"])
def test_real_steps_with_deep_supervision_bring_the_loss_down(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(READY_MADE[f"nnUNetTrainerSegcal_{name}"], tmp_path, monkeypatch)
    assert trainer.enable_deep_supervision
    batch = draw_batch(trainer)
    losses = [float(trainer.train_step(batch)["loss"]) for _ in range(40)]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < losses[0] - 0.1


class FocalWithMMCE(nnUNetTrainerSegcalLoss):  # type: ignore[misc]
    segcal_primary = "focal"
    segcal_primary_options = {"gamma": 2.0}  # noqa: RUF012
    segcal_secondary = "mmce_w"
    segcal_beta = 0.5
    segcal_dice_weight = 0.25


@pytest.mark.parametrize("ignore", [False, True])
def test_the_loss_is_dice_plus_primary_plus_beta_secondary_at_nnunets_weights(
    ignore: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(FocalWithMMCE, tmp_path, monkeypatch, ignore=ignore)
    batch = draw_batch(trainer)
    plain = make_trainer(nnUNetTrainer, tmp_path / "plain", monkeypatch, ignore=ignore)
    with torch.no_grad():
        outputs = trainer.network(batch["data"])
        found = float(trainer.loss(outputs, batch["target"]))
        expected = 0.0
        own = plain.loss.loss
        own.weight_ce = 0
        options = {"ignore_index": 3} if ignore else {}
        for weight, output, target in zip(plain.loss.weight_factors, outputs, batch["target"], strict=True):
            parts = (
                own(output, target.long()),
                make_loss("focal", gamma=2.0, **options)(output, target),
                make_loss("mmce_w", **options)(output, target),
            )
            expected += weight * float(0.25 * parts[0] + parts[1] + 0.5 * parts[2])
    assert found == pytest.approx(expected, rel=1e-5)
    if ignore:
        assert (batch["target"][0] == 3).any()
        changed = [
            torch.where(t == 3, o.argmax(dim=1, keepdim=True), t) for t, o in zip(batch["target"], outputs, strict=True)
        ]
        assert float(trainer.loss(outputs, changed)) != pytest.approx(found, rel=1e-3)


class OnlyMMCE(nnUNetTrainerSegcalLoss):  # type: ignore[misc]
    segcal_secondary = "mmce_m"
    segcal_beta = 2.0


def test_without_a_primary_loss_nnunets_own_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(OnlyMMCE, tmp_path, monkeypatch)
    plain = make_trainer(nnUNetTrainer, tmp_path / "plain", monkeypatch)
    batch = draw_batch(trainer)
    with torch.no_grad():
        outputs = trainer.network(batch["data"])
        terms = [make_loss("mmce_m")(o, t) for o, t in zip(outputs, batch["target"], strict=True)]
        added = sum(w * float(term) for w, term in zip(plain.loss.weight_factors, terms, strict=True))
        expected = float(plain.loss(outputs, batch["target"])) + 2 * added
        assert float(trainer.loss(outputs, batch["target"])) == pytest.approx(expected, rel=1e-6)


def test_regions_are_trained_as_binary_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(FocalWithMMCE, tmp_path, monkeypatch, regions=True)
    assert trainer.label_manager.has_regions
    assert trainer.label_manager.has_ignore_label
    batch = draw_batch(trainer)
    with torch.no_grad():
        outputs = trainer.network(batch["data"])
        plain = make_trainer(nnUNetTrainer, tmp_path / "plain", monkeypatch, regions=True)
        own = plain.loss.loss
        own.weight_ce, own.weight_dice = 0, 0.25
        focal = BinaryRegions(make_loss("focal", gamma=2.0), has_ignore_channel=True)
        mmce = BinaryRegions(make_loss("mmce_w"), has_ignore_channel=True)
        expected = sum(
            w * float(own(o, t) + focal(o, t) + 0.5 * mmce(o, t))
            for w, o, t in zip(plain.loss.weight_factors, outputs, batch["target"], strict=True)
        )
        assert float(trainer.loss(outputs, batch["target"])) == pytest.approx(expected, rel=1e-5)
    losses = [float(trainer.train_step(batch)["loss"]) for _ in range(15)]
    assert np.mean(losses[-3:]) < losses[0] - 0.1


def test_validation_steps_and_switched_off_deep_supervision_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(FocalWithMMCE, tmp_path, monkeypatch, ignore=True)
    with torch.no_grad():
        assert np.isfinite(trainer.validation_step(draw_batch(trainer))["loss"])

    trainer = make_trainer(FocalWithMMCE, tmp_path / "flat", monkeypatch, initialize=False)
    trainer.enable_deep_supervision = False
    trainer.initialize()
    batch = draw_batch_flat(trainer)
    losses = [float(trainer.train_step(batch)["loss"]) for _ in range(15)]
    assert losses[-1] < losses[0]


def draw_batch_flat(trainer: Any) -> dict[str, Any]:
    trainer.enable_deep_supervision = True
    batch = draw_batch(trainer)
    trainer.enable_deep_supervision = False
    return {"data": batch["data"], "target": batch["target"][0]}


def test_the_log_file_says_which_loss_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(FocalWithMMCE, tmp_path, monkeypatch)
    assert "segcal loss: 0.25 Dice + focal {'gamma': 2.0} + 0.5 mmce_w {}" in Path(trainer.log_file).read_text()
    assert "FocalWithMMCE__tinyPlans__tiny" in trainer.output_folder


class Misplaced(nnUNetTrainerSegcalLoss):  # type: ignore[misc]
    segcal_primary = "sb_ece"


class Negative(nnUNetTrainerSegcalLoss):  # type: ignore[misc]
    segcal_secondary = "sb_ece"
    segcal_beta = -1.0


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (nnUNetTrainerSegcalLoss, UsageError, r"names no loss. Train with one of nnUNetTrainerSegcal_focal"),
        (Misplaced, UsageError, r"sb_ece only judges calibration .* segcal_secondary"),
        (Negative, ParameterError, r"segcal_beta"),
    ],
)
def test_settings_that_cannot_train_are_refused(
    kind: type[Any], error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error, match=message):
        make_trainer(kind, tmp_path, monkeypatch)
