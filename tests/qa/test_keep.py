"""What others may do with the maps of a case while QA has them in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from segcal.errors import DataError, OutputError
from segcal.metrics.base import Undefined
from segcal.qa.case import QaMaps
from segcal.qa.members import MemberTally
from segcal.qa.outlyingness import OTHER_KIND
from segcal.qa.results import FlaggedCase
from segcal.qa.run import run_qa
from tests.apply_data import make_fitted, random_logits, temperature, write_manifest
from tests.qa.batches import REGION_KEYS, blob, remembering


def seen(maps: QaMaps, flagged: FlaggedCase) -> dict[str, Any]:
    assert maps.case is not None
    return {"case": flagged.case.case_id, "sum": maps.probs.sum(0), "logits": maps.case.logits.clone()}


def test_keep_sees_every_channel_and_the_pooled_logits(tmp_path: Path) -> None:
    cases = {"a": [blob(1), blob(2)], "b": [blob(3), blob(4)]}
    manifest = write_manifest(tmp_path, cases)

    result = run_qa(manifest, calibrator=temperature(2.0), keep=seen)

    assert [kept["case"] for kept in result.kept.values()] == ["a", "b"]
    assert torch.allclose(result.kept["a"]["sum"], torch.ones(8, 16, 16))
    assert np.allclose(result.kept["b"]["logits"].numpy(), np.mean(cases["b"], axis=0), atol=1e-5)
    without = run_qa(manifest, calibrator=temperature(2.0))
    assert (without.csv(), without.json()) == (result.csv(), result.json())
    assert all(kept is None for kept in without.kept.values())


def test_a_case_that_keep_gives_up_is_listed_and_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, {"a": [blob(1)], "b": [blob(2)]})

    def gives_up(maps: QaMaps, _: FlaggedCase) -> None:
        if maps.case_id == "a":
            raise DataError("a: cannot be kept")

    def full(*_: object) -> None:
        raise OutputError("the disk is full")

    assert run_qa(manifest, calibrator=temperature(2.0), keep=gives_up).failed == {"a": "a: cannot be kept"}
    with pytest.raises(OutputError, match="disk is full"):
        run_qa(manifest, calibrator=temperature(2.0), keep=full)


@pytest.mark.parametrize("regions", [False, True])
def test_the_map_of_disagreement_has_the_mean_that_qa_reports(tmp_path: Path, regions: bool) -> None:
    keys = REGION_KEYS if regions else {}
    names = ("whole", "core", "rest") if regions else ("background", "liver", "tumour")
    manifest = write_manifest(tmp_path, {"a": [random_logits(k) for k in range(3)]}, **keys)
    tallies: list[MemberTally] = []

    def take(maps: QaMaps, _: FlaggedCase) -> None:
        assert maps.tally is not None
        tallies.append(maps.tally)

    run_qa(manifest, calibrator=make_fitted("identity", classes=names, regions=regions), keep=take)

    (tally,) = tallies
    parts = [tally.disagreement_map(slice(k, k + 2)) for k in (0, 2)]
    everywhere = tally.disagreement(np.ones((4, 5, 6), dtype=bool))
    assert torch.cat(parts).shape == (4, 5, 6)
    assert float(torch.cat(parts).mean()) == pytest.approx(everywhere, rel=1e-12)
    assert 0 < everywhere < 1


def test_probability_files_are_no_outliers_in_free_energy_of_a_calibrator_fitted_on_logits(tmp_path: Path) -> None:
    reference = {name: [11.0, 12.0, 13.0, 14.0, 15.0] for name in ("free_energy_mean", "free_energy_std")}
    fitted = remembering(temperature(2.0), **reference, confidence_mean=[0.9, 0.91, 0.92, 0.93, 0.94])
    probs = torch.softmax(torch.from_numpy(blob(1)), 0).numpy()
    manifest = write_manifest(tmp_path, {"a": [probs]}, kind="probabilities")

    (found,) = run_qa(manifest, calibrator=fitted).cases

    assert found.case.outlyingness["free_energy_mean"] is OTHER_KIND
    assert found.case.outlyingness["free_energy_std"] is OTHER_KIND
    assert not isinstance(found.case.outlyingness["confidence_mean"], Undefined)
