"""The same calibrators, tables and maps from one process and from real worker processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("distributed")

from distributed.system import MEMORY_LIMIT

from segcal.apply import apply_calibrator
from segcal.case_map import CaseMap, in_process
from segcal.choosing import choose_calibrator
from segcal.evaluation.run import evaluate
from segcal.evaluation.study import study
from segcal.evaluation.study_settings import StudySettings
from segcal.fitted import FittedCalibrator
from segcal.fitting.run import fit_many
from segcal.manifest import Manifest
from segcal.qa import run_qa
from segcal.scale import DaskCases, open_cluster
from segcal.settings import Choices, PipelineSettings, SearchSpace
from tests.fit_data import write_ensemble
from tests.scale.faulty import Slow

CPU = torch.device("cpu")
SPLIT = {"calibration": (0, 1, 2, 3), "validation": (4, 5), "test": (6, 7)}
METHODS = ("ts", "ets", "dc", "cms_ap", "lts_ti")
SETTINGS = {
    "lts_ti": PipelineSettings(method="lts_ti", max_patches=30, space=SearchSpace(patience=Choices(choices=(2,))))
}
STUDY = StudySettings.parse(
    {"pipelines": [{"method": "dc", "pooling": "probabilities"}], "trials": 2, "rows": 4000, "replicates": 50},
    source="test",
)


@pytest.fixture(scope="module", params=[1, 2])
def cluster(request: pytest.FixtureRequest) -> Iterator[DaskCases]:
    with open_cluster(workers=request.param) as cases:
        yield cases


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_ensemble(tmp_path_factory.mktemp("data"), n_cases=8, split=SPLIT)


@pytest.fixture(scope="module")
def fitted(manifest: Manifest) -> dict[str, FittedCalibrator]:
    return fits(manifest, in_process)


def fits(manifest: Manifest, case_map: CaseMap, **options: Any) -> dict[str, FittedCalibrator]:
    return fit_many(
        manifest, METHODS, trials=7, polished=True, settings=SETTINGS, device=CPU, case_map=case_map, **options
    )


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_fit(cluster: DaskCases, manifest: Manifest, fitted: dict[str, FittedCalibrator]) -> None:
    told: list[tuple[str, int, int]] = []
    found = fits(manifest, cluster, progress=lambda *step: told.append(step))
    assert {name: each.sha256 for name, each in found.items()} == {n: each.sha256 for n, each in fitted.items()}
    assert ("calibration cases", 4, 4) in told
    assert [step for step in told if step[0] == "tuning dc"] == [("tuning dc", k, 7) for k in range(1, 8)]


def test_fit_of_regions(cluster: DaskCases, tmp_path: Path) -> None:
    regions = write_ensemble(tmp_path, n_cases=6, regions=True, crop=True)
    alone = fit_many(regions, ["dc"], trials=2, device=CPU)["dc"].sha256
    assert fit_many(regions, ["dc"], trials=2, device=CPU, case_map=cluster)["dc"].sha256 == alone


def test_the_chosen_calibrator(cluster: DaskCases, manifest: Manifest) -> None:
    alone, _ = choose_calibrator(manifest, trials=2, settings=SETTINGS, device=CPU)
    found, _ = choose_calibrator(manifest, trials=2, settings=SETTINGS, device=CPU, case_map=cluster)
    assert found.sha256 == alone.sha256


def test_apply(cluster: DaskCases, manifest: Manifest, fitted: dict[str, FittedCalibrator], tmp_path: Path) -> None:
    for out, case_map in (("alone", in_process), ("cluster", cluster)):
        apply_calibrator(fitted["cms_ap"], manifest, tmp_path / out, device=CPU, case_map=case_map)
    alone, found = (files_below(tmp_path / out) for out in ("alone", "cluster"))
    records = [json.loads(files.pop("run.json")) for files in (alone, found)]
    assert found == alone
    assert len(found) == 16
    for record in records:
        for case in record["cases"].values():
            case.pop("seconds")
    assert records[0] == records[1]
    again = apply_calibrator(
        fitted["cms_ap"], manifest, tmp_path / "cluster", device=CPU, resume=True, case_map=cluster
    )
    assert (again.done, len(again.skipped)) == ([], 8)


def test_evaluate(cluster: DaskCases, manifest: Manifest, fitted: dict[str, FittedCalibrator], tmp_path: Path) -> None:
    for out, case_map in (("alone", in_process), ("cluster", cluster)):
        evaluate(manifest, fitted, device=CPU, case_map=case_map).save(tmp_path / out)
    assert files_below(tmp_path / "cluster") == files_below(tmp_path / "alone")


def test_study(cluster: DaskCases, manifest: Manifest, tmp_path: Path) -> None:
    for out, case_map in (("alone", in_process), ("cluster", cluster)):
        study(manifest, STUDY, tmp_path / out, device=CPU, case_map=case_map)
    assert files_below(tmp_path / "cluster") == files_below(tmp_path / "alone")


def test_qa(cluster: DaskCases, manifest: Manifest, fitted: dict[str, FittedCalibrator], tmp_path: Path) -> None:
    apply_calibrator(fitted["ts"], manifest, tmp_path / "applied", device=CPU)
    for source in (manifest, tmp_path / "applied"):
        results = [run_qa(source, calibrator=fitted["ts"], case_map=case_map) for case_map in (in_process, cluster)]
        for name, result in zip(("alone", "cluster"), results, strict=True):
            result.save(tmp_path / name)
        assert results[0].pictures
        assert files_below(tmp_path / "cluster") == files_below(tmp_path / "alone")


def test_results_come_in_order_from_all_workers_and_none_is_this_process(cluster: DaskCases) -> None:
    outcomes = list(cluster(Slow(12), range(12)))
    assert [outcome.result()[0] for outcome in outcomes] == list(range(12))
    processes = {outcome.result()[1] for outcome in outcomes}
    assert os.getpid() not in processes
    assert len(processes) == len(cluster.client.scheduler_info()["workers"])


def test_items_are_drawn_as_there_is_room_for_them(cluster: DaskCases) -> None:
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for item in range(1000):
            drawn.append(item)
            yield item

    outcomes = cluster(Slow(0), items())
    next(outcomes)
    outcomes.close()
    assert len(drawn) <= 8 * len(cluster.client.scheduler_info()["workers"])


def test_a_worker_runs_on_one_thread(cluster: DaskCases) -> None:
    assert set(cluster.client.run(torch.get_num_threads).values()) == {1}


def test_workers_share_the_memory_of_the_machine(cluster: DaskCases) -> None:
    limits = [each["memory_limit"] for each in cluster.client.scheduler_info()["workers"].values()]
    assert sum(limits) == pytest.approx(MEMORY_LIMIT, rel=0.01)
