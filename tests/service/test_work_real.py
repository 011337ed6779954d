"""Jobs on real cases, and a real SIGTERM."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import SimpleITK

from segcal.evaluation.run import evaluate
from segcal.manifest import Manifest
from tests.service.real_results import Results, hippocampus_results, phantom_results
from tests.service.work_data import contents, job_folder, labelled_cases, layer, run

CHILD = """
import signal, sys
from pathlib import Path
from tests.service.work_data import run

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, interrupt)
print("ready", flush=True)
run(Path(sys.argv[1]), {"kind": "apply", "manifest": sys.argv[2]}, Path(sys.argv[2]).parent)
"""


@pytest.fixture(scope="module")
def results(hippocampus: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return hippocampus_results(hippocampus, tmp_path_factory.mktemp("service"), n_cases=3)


def test_real_cases_have_every_layer_on_the_grid_of_their_image(results: Results, hippocampus: Path) -> None:
    assert [row.status for row in results.outcome.cases] == ["ok"] * 3
    for row in results.outcome.cases:
        assert row.view is not None
        folder = results.folder / row.view
        view = json.loads((folder / "view.json").read_text())
        image = SimpleITK.ReadImage(hippocampus / f"images/{row.case_id}_0000.nii.gz")
        truth = SimpleITK.GetArrayFromImage(image)
        for each in view["layers"]:
            shown = SimpleITK.ReadImage(folder / each["file"])
            assert np.allclose(shown.GetOrigin(), image.GetOrigin(), atol=1e-4)
            assert np.allclose(shown.GetDirection(), image.GetDirection(), atol=1e-5)
            assert shown.GetSize() == image.GetSize()
        assert np.abs(layer(folder, "image")[0] - truth).max() <= 0.51 * np.ptp(truth) / 65534 + 1e-3
        total = sum(layer(folder, f"p{k}")[0] for k in range(3))
        assert np.abs(total - 1).max() <= 1.5 / 255 + 1e-6
        label = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(hippocampus / f"labels/{row.case_id}.nii.gz"))
        assert (layer(folder, "label")[1] == label).all()
        assert None not in (row.expected_dsc, row.disagreement, row.z_free_energy, row.z_confidence)


def test_real_reliability_is_that_of_evaluate(results: Results, hippocampus: Path) -> None:
    manifest = Manifest.load(hippocampus / "manifest.yaml")
    ids = [row.case_id for row in results.outcome.cases]
    records = evaluate(manifest, [results.fitted], cases=ids).records
    for row in results.outcome.cases:
        assert row.reliability is not None
        for when, pipeline in (("before", "uncalibrated(z)"), ("after", "cms_ap(z)")):
            (record,) = (r for r in records.rows if (r.case, r.pipeline) == (row.case_id, pipeline))
            assert np.array_equal(row.reliability[when], record.tables["top_label_15"][0])


def test_the_phantom_serves_where_there_are_no_real_data(tmp_path: Path) -> None:
    found = phantom_results(tmp_path / "phantom", tmp_path / "data", n_cases=2)
    assert [row.status for row in found.outcome.cases] == ["ok", "ok"]
    assert any(row.n_flags for row in found.outcome.cases)
    for row in found.outcome.cases:
        assert row.view is not None
        assert (found.folder / row.view / "view.json").is_file()


@pytest.mark.slow
def test_a_dask_cluster_gives_the_same_bytes(tmp_path: Path) -> None:
    scale = pytest.importorskip("segcal.scale", exc_type=ImportError)
    manifest = labelled_cases(tmp_path / "root", [f"c{k}" for k in range(6)])
    manifest.resolve(manifest.case("c3").members[0]).write_bytes(b"no archive")
    request = {"kind": "apply", "manifest": str(manifest.path)}
    here = run(tmp_path / "here", request, manifest.root)
    with scale.open_cluster(workers=2) as cases:
        there = run(tmp_path / "there", request, manifest.root, case_map=cases)
    assert there == here
    assert here.result["n_failed"] == 1
    assert contents(job_folder(tmp_path / "there")) == contents(job_folder(tmp_path / "here"))


def test_sigterm_in_the_middle_leaves_whole_files_and_the_next_attempt_ends_the_same(tmp_path: Path) -> None:
    manifest = labelled_cases(tmp_path / "root", [f"c{k:02d}" for k in range(6)])
    data = tmp_path / "data"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(data), str(manifest.path)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out = job_folder(data) / "out"
    deadline = time.monotonic() + 120
    while not (out / "c02.nii.gz").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)

    assert child.returncode == 1
    assert "Interrupted" in said.splitlines()[-1]
    assert not list(job_folder(data).rglob(".segcal-*"))
    assert not (job_folder(data) / "qa/qa.json").exists()
    again = run(data, {"kind": "apply", "manifest": str(manifest.path)}, manifest.root)
    whole = run(tmp_path / "whole", {"kind": "apply", "manifest": str(manifest.path)}, manifest.root)
    assert again == whole
    assert contents(job_folder(data)) == contents(job_folder(tmp_path / "whole"))
