"""Jobs of the other kinds: QA, evaluation, fit, study, an nnU-Net folder, one watched or uploaded case."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segcal.apply import apply_calibrator
from segcal.case_map import Item, Outcome, Result, in_process
from segcal.errors import DataError, MissingFileError, SegcalError, UsageError
from segcal.evaluation.run import evaluate
from segcal.evaluation.study_settings import StudySettings
from segcal.fitted import load_calibrator
from segcal.fitting.run import fit_many
from segcal.manifest import Manifest
from segcal.nnunet.postprocess import postprocess_folder
from segcal.qa.run import run_qa
from segcal.service.errors import RefusedPathError, UnknownError
from segcal.service.watched_output import fingerprint, outputs_in
from segcal.service.work import evaluating
from tests.apply_data import CPU, make_fitted, temperature
from tests.fit_data import write_ensemble
from tests.nnunet.folders import CLASS_LABELS, REGION_LABELS, filled, write_case, write_documents
from tests.qa.batches import blob
from tests.service.real_results import store_calibrator
from tests.service.work_data import calibrator, contents, job_folder, labelled_cases, layer, run

SPLIT = {"calibration": [0, 1, 2], "validation": [3], "test": [4, 5]}


@pytest.fixture
def ensemble(tmp_path: Path) -> Manifest:
    (tmp_path / "root").mkdir()
    return write_ensemble(tmp_path / "root", split=SPLIT)


@pytest.fixture
def predictions(tmp_path: Path) -> Path:
    """A folder as nnU-Net leaves it: cropped probabilities, properties, segmentations, documents."""
    folder = tmp_path / "root/predictions"
    write_documents(folder, labels=CLASS_LABELS)
    for name, seed in (("one", 1), ("two", 2)):
        write_case(folder, name, filled(blob(seed), [(0, 8), (2, 14), (1, 16)]), box=[(0, 8), (2, 14), (1, 16)])
    return folder


def twice(data: Path, *arguments: Any, **options: Any) -> Any:
    """Run a job two times, as after a worker that died just before it could say that it was done."""
    first = run(data, *arguments, **options)
    before = contents(job_folder(data))
    again = run(data, *arguments, **options)
    assert again == first
    assert contents(job_folder(data)) == before
    return first


def test_qa_of_a_manifest_writes_no_maps(tmp_path: Path) -> None:
    manifest = labelled_cases(tmp_path / "root", ("a", "bad", "c"))
    manifest.resolve(manifest.case("bad").members[0]).write_bytes(b"no archive")

    outcome = twice(tmp_path / "data", {"kind": "qa", "manifest": str(manifest.path)}, manifest.root)

    assert [row.status for row in outcome.cases] == ["ok", "failed", "ok"]
    assert [row.view for row in outcome.cases] == ["view/0", None, "view/2"]
    assert "bad.npz" in outcome.cases[1].error
    assert outcome.cases[0].reliability is not None
    assert not (job_folder(tmp_path / "data") / "out").exists()
    assert outcome.result["files"] == ["qa/qa.csv", "qa/qa.json", "qa/qa.html"]
    assert outcome.message.startswith("2 cases looked at, ")


def test_qa_of_an_applied_folder_has_maps_and_neither_members_nor_labels(tmp_path: Path) -> None:
    manifest = labelled_cases(tmp_path / "root")
    applied = tmp_path / "root/applied"
    apply_calibrator(calibrator(), manifest, applied, device=CPU)

    outcome = twice(tmp_path / "data", {"kind": "qa", "folder": str(applied), "cases": ["c", "a"]}, tmp_path / "root")

    assert [(row.case_id, row.view) for row in outcome.cases] == [("c", "view/0"), ("a", "view/1")]
    expected = run_qa(applied, calibrator=calibrator())
    numbers = {each.case.case_id: each.case.expected_dsc for each in expected.cases}
    assert outcome.cases[0].expected_dsc == numbers["c"]
    assert (outcome.cases[0].disagreement, outcome.cases[0].reliability) == (None, None)
    with np.load(applied / "c.npz") as content:
        shown, _, _ = layer(job_folder(tmp_path / "data") / "view/0", "p1")
        assert np.abs(shown - content["probabilities"][1]).max() <= 0.5 / 255 + 1e-6


def test_qa_of_a_folder_without_a_record_says_what_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "root/empty").mkdir(parents=True)
    with pytest.raises(UsageError, match="not written by `segcal apply`"):
        run(tmp_path / "data", {"kind": "qa", "folder": str(tmp_path / "root/empty")}, tmp_path / "root")


def test_a_folder_of_nnunet_is_copied_as_postprocess_does_and_looked_at_with_its_box(
    predictions: Path, tmp_path: Path
) -> None:
    outcome = twice(tmp_path / "data", {"kind": "apply", "folder": str(predictions)}, tmp_path / "root")

    plain = postprocess_folder(calibrator(), predictions, tmp_path / "plain", device=CPU)
    assert contents(job_folder(tmp_path / "data") / "out") == contents(tmp_path / "plain")
    assert [row.case_id for row in outcome.cases] == ["one", "two"]
    assert outcome.cases[0].files == ("out/one.npz", "out/one.nii.gz", "out/one.pkl")
    expected = run_qa(plain.manifest, calibrator=calibrator())
    numbers = {each.case.case_id: each.case for each in expected.cases}
    assert outcome.cases[1].boundary_confidence == numbers["two"].boundary_confidence
    assert outcome.cases[1].z_confidence == numbers["two"].outlyingness["confidence_mean"]
    assert outcome.cases[1].z_free_energy is None  # probabilities have none


def test_one_broken_output_of_a_folder_is_listed(predictions: Path, tmp_path: Path) -> None:
    (predictions / "one.npz").write_bytes((predictions / "one.npz").read_bytes()[:3000])
    outcome = run(tmp_path / "data", {"kind": "apply", "folder": str(predictions)}, tmp_path / "root")
    assert [(row.status, row.view) for row in outcome.cases] == [("failed", None), ("ok", "view/1")]
    assert "one.npz" in outcome.cases[0].error


def test_a_watched_output_is_calibrated_alone(predictions: Path, tmp_path: Path) -> None:
    names = ["one.npz", "one.pkl", "one.nii.gz"]
    outcome = twice(tmp_path / "data", {"kind": "case", "case": "one", "source": str(predictions), "files": names})

    whole = run(tmp_path / "whole", {"kind": "apply", "folder": str(predictions)}, tmp_path / "root")
    assert outcome.cases == (whole.cases[0],)
    ours, theirs = (contents(job_folder(data) / "out") for data in (tmp_path / "data", tmp_path / "whole"))
    assert ours == {name: content for name, content in theirs.items() if not name.startswith("two")}
    assert json.loads(ours["dataset.json"])["labels"] == CLASS_LABELS
    assert json.loads((job_folder(tmp_path / "data") / "qa/qa.json").read_text())["name"] == "predictions"


def test_a_watched_output_that_went_away_says_so(predictions: Path, tmp_path: Path) -> None:
    (predictions / "one.pkl").unlink()
    wanted = {"kind": "case", "case": "one", "source": str(predictions), "files": ["one.npz", "one.pkl", "one.nii.gz"]}
    with pytest.raises(MissingFileError, match=r"one: one\.pkl is gone from the watched folder; put it back and try"):
        run(tmp_path / "data", wanted)


def test_an_output_that_was_predicted_again_is_left_to_the_job_of_its_new_version(
    predictions: Path, tmp_path: Path
) -> None:
    (output,) = (each for each in outputs_in(predictions) if each.case == "one")
    wanted = {"kind": "case", "case": "one", "source": str(predictions), "files": list(output.names)}
    wanted["fingerprint"] = fingerprint(predictions, output)
    assert run(tmp_path / "data", wanted).cases[0].status == "ok"

    def replaced_on_the_way(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Outcome[Item, Result]]:
        yield from in_process(work, items)
        write_case(predictions, "one", filled(blob(7), None))

    for case_map in (replaced_on_the_way, in_process):
        with pytest.raises(DataError, match="one: was predicted again"):
            run(tmp_path / "data", wanted, case_map=case_map)


def test_a_link_in_a_watched_folder_does_not_lead_out_of_it(predictions: Path, tmp_path: Path) -> None:
    (predictions / "three.npz").symlink_to("/etc/hostname")
    wanted = {"kind": "case", "case": "three", "source": str(predictions), "files": ["three.npz"]}
    with pytest.raises(RefusedPathError):
        run(tmp_path / "data", wanted)
    with pytest.raises(RefusedPathError):
        run(tmp_path / "data", {**wanted, "case": "x", "files": ["../../secret.npz"]})


def test_a_broken_watched_output_fails_without_naming_the_services_folder(predictions: Path, tmp_path: Path) -> None:
    (predictions / "one.npz").write_bytes((predictions / "one.npz").read_bytes()[:3000])
    names = ["one.npz", "one.pkl", "one.nii.gz"]
    with pytest.raises(SegcalError, match=r"in/predictions/one\.npz: .*") as failed:
        run(tmp_path / "data", {"kind": "case", "case": "one", "source": str(predictions), "files": names})
    assert str(tmp_path) not in str(failed.value)


@pytest.mark.parametrize("kind", ["logits", "probabilities"])
def test_an_uploaded_archive_is_calibrated_with_the_calibrators_classes(tmp_path: Path, kind: str) -> None:
    logits, box = blob(1), [(0, 8), (2, 14), (1, 16)]
    given = job_folder(tmp_path / "data") / "in"
    given.mkdir(parents=True)
    arrays = {"logits": logits} if kind == "logits" else {"probabilities": filled(logits, box)}
    np.savez_compressed(given / "scan 7.npz", **arrays)  # type: ignore[arg-type]

    outcome = twice(tmp_path / "data", {"kind": "case", "case": "scan 7"})

    (row,) = outcome.cases
    assert (row.case_id, row.status, row.view) == ("scan 7", "ok", "view/0")
    assert (row.z_free_energy is None) == (kind == "probabilities")
    assert row.z_confidence is not None
    with np.load(job_folder(tmp_path / "data") / "out/scan 7.npz") as content:
        probs = content["probabilities"]
        if kind == "probabilities":
            assert content["crop"].tolist() == [list(bounds) for bounds in box]
            assert (probs[0, :, :2] == 1).all()
    heated = np.exp(logits / 2) / np.exp(logits / 2).sum(0)
    inside = (slice(None), slice(0, 8), slice(2, 14), slice(1, 16))
    assert np.allclose(probs[inside], heated[inside], atol=1e-4)
    assert (given / "scan 7.npz").is_file()


def test_an_uploaded_region_case_numbers_its_regions(tmp_path: Path) -> None:
    given = job_folder(tmp_path / "data") / "in"
    given.mkdir(parents=True)
    logits = np.random.default_rng(0).normal(0, 3, (2, 4, 5, 6)).astype(np.float32)
    np.savez_compressed(given / "x.npz", logits=logits)
    fitted = temperature(2.0, classes=("whole", "core"), regions=True)
    run(tmp_path / "data", {"kind": "case", "case": "x"}, fitted=fitted)
    _, stored, _ = layer(job_folder(tmp_path / "data") / "view/0", "segmentation")
    assert (stored == np.where(logits[1] > 0, 2, np.where(logits[0] > 0, 1, 0))).all()


def test_a_region_folder_of_nnunet_works(tmp_path: Path) -> None:
    folder = tmp_path / "root/regions"
    write_documents(folder, labels=REGION_LABELS)
    logits = np.random.default_rng(0).normal(0, 3, (2, 4, 5, 6)).astype(np.float32)
    write_case(folder, "a", filled(logits, None, regions=True), regions=True)
    fitted = make_fitted("ts", {"temperature": np.array([2.0])}, classes=("whole", "core"), regions=True)
    outcome = run(tmp_path / "data", {"kind": "apply", "folder": str(folder)}, tmp_path / "root", fitted=fitted)
    assert outcome.cases[0].status == "ok"
    assert np.abs(layer(job_folder(tmp_path / "data") / "view/0", "p1")[0] - 1 / (1 + np.exp(-logits[1] / 2))).max() < (
        0.5 / 255 + 1e-4
    )


def test_evaluation_measures_what_segcal_evaluate_does_and_writes_the_report(
    ensemble: Manifest, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    hashes = [store_calibrator(temperature(t), data) for t in (1.5, 2.0)]
    hashes.append(store_calibrator(make_fitted("identity"), data))
    wanted = {"kind": "evaluate", "manifest": str(ensemble.path), "calibrators": hashes[:2], "split": 0}

    outcome = twice(data, wanted, ensemble.root)

    named = {f"ts(z) {sha256[:8]}": temperature(t) for sha256, t in zip(hashes[:2], (1.5, 2.0), strict=True)}
    plain = evaluate(ensemble, named, split=0)
    plain.save(tmp_path / "plain")
    assert contents(job_folder(data) / "out") == contents(tmp_path / "plain")
    assert [p["name"] for p in outcome.result["pipelines"]][-2:] == list(named)
    means = {p["name"]: p["metrics"]["nll"]["mean"] for p in plain.summary["pipelines"]}
    assert {p["name"]: p["nll"] for p in outcome.result["pipelines"]} == means
    assert outcome.result["n_cases"] == 2
    assert "<html" in (job_folder(data) / "report.html").read_text()
    assert outcome.result["files"][0] == "report.html"
    assert outcome.cases == ()


def test_evaluation_leaves_broken_cases_out_and_names_them(ensemble: Manifest, tmp_path: Path) -> None:
    ensemble.resolve(ensemble.case("case_04").members[0]).write_bytes(b"no archive")
    wanted = {"kind": "evaluate", "manifest": str(ensemble.path), "split": 0}
    sha256 = store_calibrator(temperature(1.5), tmp_path / "data")
    outcome = run(tmp_path / "data", {**wanted, "calibrators": [sha256]}, ensemble.root)
    assert list(outcome.result["failed"]) == ["case_04"]
    assert outcome.message.endswith("1 failed")
    ensemble.resolve(ensemble.case("case_05").members[0]).write_bytes(b"no archive")
    with pytest.raises(DataError, match="no case could be evaluated"):
        run(tmp_path / "data", {**wanted, "calibrators": [sha256]}, ensemble.root)


def test_an_unknown_calibrator_and_a_subset_without_split_are_refused(ensemble: Manifest, tmp_path: Path) -> None:
    wanted = {"kind": "evaluate", "manifest": str(ensemble.path), "calibrators": ["ab" * 32]}
    with pytest.raises(UnknownError, match="abababababab…: its file is not there"):
        run(tmp_path / "data", wanted, ensemble.root)
    with pytest.raises(UsageError, match="name the split too"):
        run(tmp_path / "data", {**wanted, "subset": "test"}, ensemble.root)


def test_fitted_calibrators_are_those_of_segcal_fit(ensemble: Manifest, tmp_path: Path) -> None:
    wanted = {"kind": "fit", "manifest": str(ensemble.path), "methods": ["ts", "cms_ap"], "trials": 2, "seed": 3}
    outcome = twice(tmp_path / "data", wanted, ensemble.root)

    plain = fit_many(ensemble, ["ts", "cms_ap"], trials=2, seed=3)
    assert outcome.calibrators == ("out/ts.safetensors", "out/cms_ap.safetensors")
    for described, file in zip(outcome.result["calibrators"], outcome.calibrators, strict=True):
        path = job_folder(tmp_path / "data") / file
        assert path.read_bytes() == plain[described["method"]].content
        assert load_calibrator(path).sha256 == described["sha256"]
        assert described["fit_nll"] == plain[described["method"]].info.fit_nll
    assert outcome.message == "fitted ts, cms_ap"


def test_a_method_nobody_knows_fails_with_the_list(ensemble: Manifest, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown method `magic`; known are"):
        run(tmp_path / "data", {"kind": "fit", "manifest": str(ensemble.path), "methods": ["magic"]}, ensemble.root)


def test_a_study_goes_on_where_it_was_killed_and_starts_anew_when_its_files_changed(
    ensemble: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = StudySettings.model_validate(
        {"pipelines": [{"method": "ts", "pooling": "logits"}], "trials": 1, "replicates": 20}
    )
    monkeypatch.setattr(evaluating, "load_study_settings", lambda name: small)
    wanted = {"kind": "study", "manifest": str(ensemble.path)}
    outcome = run(tmp_path / "data", wanted, ensemble.root)
    before = contents(job_folder(tmp_path / "data"))
    assert "ts(z)" in [p["name"] for p in outcome.result["pipelines"]]
    assert "report.html" in before
    fits = job_folder(tmp_path / "data") / "out/fits"
    written = {path.name: path.stat().st_mtime_ns for path in fits.iterdir()}

    # Killed before the tables were written.
    (job_folder(tmp_path / "data") / "out/summary.json").unlink()
    (job_folder(tmp_path / "data") / "report.html").unlink()
    assert run(tmp_path / "data", wanted, ensemble.root) == outcome
    assert contents(job_folder(tmp_path / "data")) == before
    assert {path.name: path.stat().st_mtime_ns for path in fits.iterdir()} == written

    monkeypatch.setattr(evaluating, "write_report", lambda *_, **__: None)
    member = ensemble.resolve(ensemble.cases[0].members[0])
    np.savez_compressed(member, logits=np.load(member)["logits"] * np.float32(0.5))
    changed = run(tmp_path / "data", wanted, ensemble.root)
    assert changed.result["pipelines"] != outcome.result["pipelines"]
    assert {path.name for path in fits.iterdir()} == set(written)
    assert {path.name: path.stat().st_mtime_ns for path in fits.iterdir()} != written
