"""Apply as a job: maps, QA, layers and reliability; the same whatever interrupted it; poison cases listed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from PIL import Image
from scipy.special import entr

from segcal.apply import apply_calibrator
from segcal.case_map import Item, Outcome, Result, in_process
from segcal.cases import load_case
from segcal.errors import DataError, Interrupted, UsageError
from segcal.evaluation.run import evaluate
from segcal.fitted import FittedCalibrator
from segcal.manifest import Manifest
from segcal.qa.run import run_qa
from segcal.service.files import ServiceFiles
from segcal.service.model import NewCase
from segcal.service.requests import QaRequest
from segcal.service.work.context import JobFolder
from segcal.service.work.outcome import Outcome as JobOutcome
from tests.apply_data import CPU, make_fitted, preserving, rotated, temperature, write_manifest, write_member
from tests.fit_data import write_ensemble
from tests.qa.batches import REGION_KEYS, blob
from tests.service.work_data import calibrator, contents, job_folder, labelled_cases, layer, run


class Killed(BaseException):
    """The process died."""


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return labelled_cases(tmp_path / "root")


def request(manifest: Manifest, **options: Any) -> dict[str, Any]:
    return {"kind": "apply", "manifest": str(manifest.path), **options}


def first_view(outcome: JobOutcome, data: Path) -> tuple[Path, dict[str, Any]]:
    view = outcome.cases[0].view
    assert view is not None
    folder = job_folder(data) / view
    return folder, json.loads((folder / "view.json").read_text())


def test_the_maps_are_those_of_segcal_apply_and_the_numbers_those_of_segcal_qa(
    manifest: Manifest, tmp_path: Path
) -> None:
    outcome = run(tmp_path / "data", request(manifest), manifest.root)

    apply_calibrator(calibrator(), manifest, tmp_path / "plain", device=CPU)
    found = run_qa(manifest, calibrator=calibrator())
    assert contents(job_folder(tmp_path / "data") / "out") == contents(tmp_path / "plain")
    assert [case.case_id for case in outcome.cases] == ["a", "b", "c"]
    for flagged in found.cases:
        (row,) = (case for case in outcome.cases if case.case_id == flagged.case.case_id)
        assert row.expected_dsc == flagged.case.expected_dsc
        assert row.z_free_energy == flagged.case.outlyingness["free_energy_mean"]
        assert row.flags == tuple((flag.code, flag.text) for flag in flagged.flags)
        assert (row.n_flags, row.status, row.calibrator) == (len(flagged.flags), "ok", calibrator().sha256)
        assert row.files == (f"out/{row.case_id}.npz", f"out/{row.case_id}.nii.gz")
        assert {name for name, value in row.numbers.items() if value is None} == set(row.numbers["undefined"])
    found.save(tmp_path / "qa")
    assert contents(job_folder(tmp_path / "data") / "qa") == contents(tmp_path / "qa")
    assert outcome.result["n_done"] == 3
    assert outcome.message.startswith("3 cases calibrated, ")


def test_layers_hold_the_maps_to_half_a_step_with_the_true_affine(manifest: Manifest, tmp_path: Path) -> None:
    outcome = run(tmp_path / "data", request(manifest, cases=["b"]), manifest.root)
    folder, view = first_view(outcome, tmp_path / "data")

    data = load_case(manifest, manifest.case("b"), pooling="logits", device=CPU, with_labels=True)
    probs = calibrator().volume_probs(data).numpy().astype(np.float64)
    for k in range(3):
        shown, stored, affine = layer(folder, f"p{k}")
        assert stored.dtype == np.uint8
        assert np.abs(shown - probs[k]).max() <= 0.5 / 255 + 1e-6
        assert np.allclose(affine, rotated(), atol=1e-5)
    entropy = entr(probs).sum(0) / np.log(3)
    shown, stored, _ = layer(folder, "entropy")
    assert np.abs(shown - entropy).max() <= 0.5 / 255 + 1e-6
    assert stored.max() > 100
    assert (layer(folder, "segmentation")[1] == data.decision.numpy()).all()
    assert data.labels is not None
    assert (layer(folder, "label")[1] == data.labels.numpy()).all()
    members = [np.load(manifest.resolve(m))["logits"].argmax(0) for m in manifest.case("b").members]
    assert (layer(folder, "disagreement")[1] == 255 * (members[0] != members[1])).all()
    assert 0 < (members[0] != members[1]).mean() < 1
    names = ["image", "segmentation", "p0", "p1", "p2", "entropy", "disagreement", "label"]
    assert [each["name"] for each in view["layers"]] == names
    assert (view["shape"], view["classes"]) == ([8, 16, 16], ["background", "liver", "tumour"])
    assert view["spacing"] == pytest.approx([2.5, 1.1, 0.8])
    doubt = 1 - probs.max(0)
    assert view["middle"] == [int(doubt.sum(axis=axes).argmax()) for axes in ((1, 2), (0, 2), (0, 1))]


def test_an_image_keeps_its_intensities_to_half_a_step_and_whole_numbers_exactly(
    manifest: Manifest, tmp_path: Path
) -> None:
    whole = np.random.default_rng(0).integers(-1000, 3000, (8, 16, 16)).astype(np.int16)
    nib.save(nib.Nifti1Image(whole.T, rotated()), manifest.root / "images/b_0000.nii.gz")
    outcome = run(tmp_path / "data", request(manifest), manifest.root)
    folder, view = first_view(outcome, tmp_path / "data")

    real: Any = nib.load(manifest.root / "images/a_0000.nii.gz")
    truth = np.asarray(real.dataobj).T
    shown, stored, affine = layer(folder, "image")
    assert stored.dtype == np.int16
    assert np.abs(shown - truth).max() <= 0.51 * (truth.max() - truth.min()) / 65534
    assert np.allclose(affine, rotated(), atol=1e-5)
    low, high = view["layers"][0]["low"], view["layers"][0]["high"]
    assert (low, high) == pytest.approx(np.percentile(truth, [0.5, 99.5]), rel=1e-5)
    assert (layer(folder.parent / "1", "image")[1] == whole).all()


def test_an_image_that_lies_elsewhere_in_space_is_shown_with_a_note(manifest: Manifest, tmp_path: Path) -> None:
    values = np.arange(8 * 16 * 16, dtype=np.int16).reshape(8, 16, 16)
    nib.save(nib.Nifti1Image(values.T, np.eye(4)), manifest.root / "images/a_0000.nii.gz")
    outcome = run(tmp_path / "data", request(manifest), manifest.root)
    folder, view = first_view(outcome, tmp_path / "data")
    assert (layer(folder, "image")[1] == values).all()
    assert "a_0000.nii.gz: its header puts it elsewhere" in view["notes"][0]
    assert outcome.cases[0].numbers["notes"] == view["notes"]
    assert "notes" not in outcome.cases[1].numbers


@pytest.mark.parametrize("kind", ["classes", "regions", "cropped", "ignored"])
def test_reliability_tables_are_those_of_evaluate(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    flags = {kind: True} if kind in ("regions",) else {"crop": kind == "cropped", "ignored": kind == "ignored"}
    manifest = write_ensemble(root, n_cases=2, **flags)
    fitted = preserving("cms_ap", 2 if kind == "regions" else 3, regions=kind == "regions")
    info = fitted.info.model_copy(update={"classes": manifest.class_names})
    fitted = FittedCalibrator(fitted.calibrator, info)

    outcome = run(tmp_path / "data", request(manifest), root, fitted=fitted)

    records = evaluate(manifest, [fitted]).records
    for row in outcome.cases:
        assert row.reliability is not None
        for when, pipeline in (("before", "uncalibrated(z)"), ("after", "cms_ap(z)")):
            (record,) = (r for r in records.rows if (r.case, r.pipeline) == (row.case_id, pipeline))
            assert np.array_equal(row.reliability[when], record.tables["top_label_15"].sum(0)), (when, row.case_id)
        assert row.reliability["before"] != row.reliability["after"]


def test_a_job_killed_between_cases_ends_with_the_same_bytes(manifest: Manifest, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", request(manifest), manifest.root)

    def dying(after: int) -> Callable[..., Generator[Outcome[Any, Any]]]:
        def case_map(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Outcome[Item, Result]]:
            for position, outcome in enumerate(in_process(work, items)):
                if position == after:
                    raise Killed
                yield outcome

        return case_map

    data = tmp_path / "killed"
    for after in (1, 2, 1):
        with pytest.raises(Killed):
            run(data, request(manifest), manifest.root, case_map=dying(after))
    # Half a file of a process that had no time to clean up, and layers of another attempt.
    (job_folder(data) / "out/.segcal-0123-a.npz").write_bytes(b"half")
    (job_folder(data) / "view/7").mkdir(parents=True)
    (job_folder(data) / "view/7/view.json").write_text("{}")
    applied = (job_folder(data) / "out/a.npz").stat().st_mtime_ns
    again = run(data, request(manifest), manifest.root)

    assert again == whole
    assert contents(job_folder(data)) == contents(job_folder(tmp_path / "whole"))
    assert (job_folder(data) / "out/a.npz").stat().st_mtime_ns == applied  # not done a second time
    assert run(data, request(manifest), manifest.root) == whole


def test_ctrl_c_ends_the_job_and_leaves_whole_files_only(manifest: Manifest, tmp_path: Path) -> None:
    def stopped(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Outcome[Item, Result]]:
        yield from list(in_process(work, items))[:1]
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=r"^(?!.*/data/)"):
        run(tmp_path / "data", request(manifest), manifest.root, case_map=stopped)
    assert not list(job_folder(tmp_path / "data").rglob(".segcal-*"))
    assert (job_folder(tmp_path / "data") / "out/a.npz").is_file()


def test_broken_cases_are_listed_with_what_is_wrong_while_the_others_are_done(tmp_path: Path) -> None:
    manifest = labelled_cases(tmp_path / "root", ("cut", "good", "nan", "shape", "gone"))
    members = {name: manifest.resolve(manifest.case(name).members[1]) for name in ("cut", "nan", "shape", "gone")}
    members["cut"].write_bytes(members["cut"].read_bytes()[:5000])
    spoilt = blob(3)
    spoilt[1, 2, 3, 4] = np.nan
    write_member(members["nan"], spoilt)
    write_member(members["shape"], blob(3, depth=7))
    members["gone"].unlink()

    outcome = run(tmp_path / "data", request(manifest), manifest.root)

    rows = {row.case_id: row for row in outcome.cases}
    assert {name for name, row in rows.items() if row.status == "failed"} == {"cut", "nan", "shape", "gone"}
    said = {"cut": "truncated", "nan": "NaN", "shape": "shape", "gone": "no such file"}
    for name, words in said.items():
        assert words.lower() in rows[name].error.lower(), rows[name].error
        assert rows[name].view is None
    assert rows["good"].view == "view/1"
    assert outcome.result["n_failed"] == 4
    assert outcome.message.endswith("4 failed")


def test_a_job_without_a_single_good_case_has_failed_with_the_reason(manifest: Manifest, tmp_path: Path) -> None:
    for case in manifest.cases:
        manifest.resolve(case.members[0]).write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"none of the 3 cases could be done; the first: .*a\.npz"):
        run(tmp_path / "data", request(manifest), manifest.root)


def test_a_job_begun_again_takes_files_as_they_are_now(manifest: Manifest, tmp_path: Path) -> None:
    """As when it is tried again: what was finished is kept where its input is the same, the rest is done anew."""
    member = manifest.resolve(manifest.case("b").members[0])
    run(tmp_path / "data", request(manifest), manifest.root)
    out = job_folder(tmp_path / "data") / "out"
    kept = (out / "a.npz").stat().st_mtime_ns
    np.savez_compressed(member, logits=blob(77, noise=2.0))

    run(tmp_path / "data", request(manifest), manifest.root)

    run(tmp_path / "new", request(manifest), manifest.root)
    assert contents(job_folder(tmp_path / "data")) == contents(job_folder(tmp_path / "new"))
    assert (out / "a.npz").stat().st_mtime_ns == kept


@pytest.mark.parametrize("kind", ["apply", "qa"])
def test_a_request_for_no_case_is_refused(manifest: Manifest, tmp_path: Path, kind: str) -> None:
    with pytest.raises(UsageError, match="no case to work on"):
        run(tmp_path / "data", request(manifest, cases=[]) | {"kind": kind}, manifest.root)


def test_files_are_named_as_the_manifest_names_them(manifest: Manifest, tmp_path: Path) -> None:
    (manifest.root / manifest.case("b").members[0]).write_bytes(b"PK nothing")
    outcome = run(tmp_path / "data", request(manifest), manifest.root)
    assert outcome.cases[1].error.startswith(f"{manifest.case('b').members[0]}: not a readable .npz")
    shown = (job_folder(tmp_path / "data") / "qa/qa.json").read_text() + json.dumps(outcome.to_json())
    assert str(manifest.root) not in shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/data/a/x.npz: truncated", "x.npz: truncated"),
        ("grids differ (/data/a/x.npz vs /data/a/../y.nii.gz)", "grids differ (x.npz vs ../y.nii.gz)"),
        ("'/data/a/x.npz' is a pipe", "'x.npz' is a pipe"),
        ("/mnt/data/a/x.npz and /data/ab/y.npz", "/mnt/data/a/x.npz and /data/ab/y.npz"),
    ],
)
def test_only_the_folder_itself_is_left_out_of_a_message(tmp_path: Path, text: str, said: str) -> None:
    request = QaRequest(calibrator="0" * 64, manifest="/data/a/m.yaml")
    assert JobFolder.of("0" * 24, ServiceFiles(tmp_path), request).said(text) == said


def test_a_broken_image_or_label_is_noted_and_the_case_still_looked_at(manifest: Manifest, tmp_path: Path) -> None:
    strange = np.full((16, 16, 8), 7, dtype=np.uint8)
    nib.save(nib.Nifti1Image(strange, rotated()), manifest.root / "labels/a.nii.gz")
    image = manifest.root / "images/b_0000.nii.gz"
    nib.save(nib.Nifti1Image(np.zeros((4, 4, 4), dtype=np.uint8), rotated()), image)

    outcome = run(tmp_path / "data", request(manifest), manifest.root)

    a, b, c = outcome.cases
    assert (a.status, b.status, c.status) == ("ok", "ok", "ok")
    assert a.reliability is None
    assert a.numbers["notes"][0].startswith("not compared with its label: a: labels/a.nii.gz holds the label values 7")
    assert "labels/a.nii.gz holds the label values 7" in a.numbers["notes"][0]
    assert "image cannot be shown" in b.numbers["notes"][0]
    assert b.reliability is not None
    assert "notes" not in c.numbers
    assert not (job_folder(tmp_path / "data") / "view/1/image.nii.gz").exists()


def test_regions_have_a_layer_each_and_labels_painted_as_the_segmentation(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    manifest = write_ensemble(root, n_cases=1, regions=True)
    fitted = temperature(1.5, classes=("organ", "lesion"), regions=True)
    outcome = run(tmp_path / "data", request(manifest), root, fitted=fitted)
    folder, view = first_view(outcome, tmp_path / "data")

    data = load_case(manifest, manifest.cases[0], pooling="logits", device=CPU, with_labels=True)
    probs = fitted.volume_probs(data).numpy().astype(np.float64)
    assert (view["regions"], view["classes"]) == (True, ["organ", "lesion"])
    assert view["labels"] == ["background", "organ", "lesion"]
    for k in range(2):
        assert np.abs(layer(folder, f"p{k}")[0] - probs[k]).max() <= 0.5 / 255 + 1e-6
    binary = entr(np.stack([probs, 1 - probs])).sum((0, 1)) / (2 * np.log(2))
    assert np.abs(layer(folder, "entropy")[0] - binary).max() <= 0.5 / 255 + 1e-6
    truth = np.asarray(nib.load(root / "labels/case_00.nii.gz").dataobj).T  # type: ignore[attr-defined]
    assert (layer(folder, "label")[1] == truth).all()  # regions are {1, 2} and {2}, so painting gives the labels back
    painted = np.where(probs[1] > 0.5, 2, np.where(probs[0] > 0.5, 1, 0))
    assert (layer(folder, "segmentation")[1] == painted).all()


def test_flat_colour_pictures_without_geometry_get_the_identity(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    logits = blob(1, depth=1, size=24)
    manifest = write_manifest(root, {"slide": [logits]}, extra={"image": "slide.png", "label": "truth.png"})
    colours = np.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=np.uint8)
    Image.fromarray(colours).save(root / "slide.png")
    Image.fromarray(logits[:, 0].argmax(0).astype(np.uint8)).save(root / "truth.png")

    outcome = run(tmp_path / "data", request(manifest), root)

    folder, view = first_view(outcome, tmp_path / "data")
    shown, _, affine = layer(folder, "image")
    assert (affine == np.eye(4)).all()
    assert np.abs(shown[0] - colours.mean(2)).max() <= 0.01
    assert (view["shape"], view["spacing"], view["geometry"]) == ([1, 24, 24], [1.0, 1.0, 1.0], False)
    assert not (folder / "disagreement.nii.gz").exists()  # one member cannot disagree
    assert outcome.cases[0].files == ("out/slide.npz", "out/slide.png")
    assert outcome.cases[0].disagreement is None
    assert outcome.cases[0].numbers["undefined"]["disagreement"] == "there is one member only"


def test_a_case_without_image_and_label_has_neither_layer_nor_reliability(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    manifest = write_manifest(root, {"a": [blob(1), blob(2)]})
    outcome = run(tmp_path / "data", request(manifest), root)
    _, view = first_view(outcome, tmp_path / "data")
    assert [each["name"] for each in view["layers"]] == ["segmentation", "p0", "p1", "p2", "entropy", "disagreement"]
    assert outcome.cases[0].reliability is None


def test_without_qa_there_are_rows_and_files_and_no_layers(manifest: Manifest, tmp_path: Path) -> None:
    outcome = run(tmp_path / "data", request(manifest, qa=False, format="nifti", dtype="uint16"), manifest.root)
    assert [(row.status, row.view, row.expected_dsc) for row in outcome.cases] == [("ok", None, None)] * 3
    assert outcome.cases[0].files == ("out/probabilities/a.nii.gz", "out/a.nii.gz")
    assert not (job_folder(tmp_path / "data") / "view").exists()
    assert outcome.message == "3 cases calibrated"


def test_cases_may_run_in_other_processes(manifest: Manifest, tmp_path: Path) -> None:
    """Everything that is handed to a cluster can be pickled, and so can everything that comes back."""

    def elsewhere(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Outcome[Item, Result]]:
        sent = pickle.loads(pickle.dumps(work))
        for item in items:
            yield pickle.loads(pickle.dumps(Outcome(item, sent(item))))

    here = run(tmp_path / "here", request(manifest), manifest.root)
    there = run(tmp_path / "there", request(manifest), manifest.root, case_map=elsewhere)
    assert there == here
    assert contents(job_folder(tmp_path / "there")) == contents(job_folder(tmp_path / "here"))


def test_the_outcome_goes_through_json_unchanged_and_names_no_place_of_the_service(tmp_path: Path) -> None:
    manifest = labelled_cases(tmp_path / "root", ("a", "bad"))
    manifest.resolve(manifest.case("bad").members[0]).write_bytes(b"no archive")
    outcome = run(tmp_path / "data", request(manifest), manifest.root)
    text = json.dumps(outcome.to_json(), allow_nan=False)
    assert JobOutcome.from_json(json.loads(text)) == outcome
    assert isinstance(JobOutcome.from_json(json.loads(text)).cases[0], NewCase)
    assert str(tmp_path / "data") not in text
    for path in job_folder(tmp_path / "data").rglob("*.json"):
        assert str(tmp_path / "data") not in path.read_text()


def test_a_calibrator_of_other_classes_fails_the_job_with_both_lists(manifest: Manifest, tmp_path: Path) -> None:
    other = make_fitted("identity", classes=("background", "kidney", "tumour"))
    with pytest.raises(ValueError, match="names of classes differ"):
        run(tmp_path / "data", request(manifest), manifest.root, fitted=other)


def test_region_disagreement_is_the_mean_over_regions(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    rng = np.random.default_rng(0)
    members = [rng.normal(0, 3, (3, 4, 5, 6)).astype(np.float32) for _ in range(2)]
    manifest = write_manifest(root, {"a": members}, **REGION_KEYS)
    fitted = make_fitted("identity", classes=("whole", "core", "rest"), regions=True)
    outcome = run(tmp_path / "data", request(manifest), root, fitted=fitted)
    folder, _ = first_view(outcome, tmp_path / "data")
    expected = ((members[0] > 0) != (members[1] > 0)).mean(0)
    assert np.abs(layer(folder, "disagreement")[0] - expected).max() <= 0.5 / 255 + 1e-6
