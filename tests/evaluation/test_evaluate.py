"""Evaluation: one read a case for all pipelines, numbers that belong to the right pipeline, files that read back."""

from __future__ import annotations

import copy
import csv
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import segcal.cases as cases
from segcal.cases import Want, load_case, load_poolings
from segcal.chunks import chunk_budget
from segcal.errors import DataError, OutputError, UsageError
from segcal.evaluation.measure import measure_case
from segcal.evaluation.pipelines import baselines
from segcal.evaluation.records import Records
from segcal.evaluation.run import evaluate
from segcal.evaluation.summary import HEADLINE, BootstrapSettings
from segcal.evaluation.tables import cell, latex_table, markdown_table
from segcal.fitted import FittedCalibrator
from segcal.fitting.run import fit_many
from segcal.manifest import Manifest
from segcal.metrics import MetricSettings
from tests.fit_data import write_ensemble

CPU = torch.device("cpu")
QUICK = BootstrapSettings(n_replicates=200)


@pytest.fixture(scope="module")
def result(phantom: Manifest, fitted: dict[str, FittedCalibrator]):  # type: ignore[no-untyped-def]
    return evaluate(phantom, list(fitted.values()), split=0, bootstrap=QUICK, device=CPU)


def test_the_uncalibrated_pipelines_are_always_in_the_table(result) -> None:  # type: ignore[no-untyped-def]
    names = [p["name"] for p in result.summary["pipelines"]]
    assert names == ["p0", "uncalibrated(p)", "uncalibrated(z)", "ts(z)", "ms(z)", "cms_ap(z)"]


def test_every_member_file_is_read_once_for_all_pipelines(
    phantom: Manifest, fitted: dict[str, FittedCalibrator], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: Counter[str] = Counter()
    original = cases.read_member

    def counted(path: Path, **options: object) -> object:
        reads[str(path)] += 1
        return original(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(cases, "read_member", counted)
    evaluate(phantom, list(fitted.values()), split=0, bootstrap=QUICK, device=CPU)
    assert set(reads.values()) == {1}
    assert len(reads) == 3 * len(phantom.splits[0].test)


def test_numbers_are_those_of_an_explicit_loop(
    result,
    phantom: Manifest,
    fitted: dict[str, FittedCalibrator],  # type: ignore[no-untyped-def]
) -> None:
    for pipeline, pooling, n_members, method in (
        ("p0", "logits", 1, None),
        ("uncalibrated(p)", "probabilities", None, None),
        ("ts(z)", "logits", None, "ts"),
        ("ms(z)", "logits", None, "ms"),
    ):
        for case_id in phantom.splits[0].test:
            case = load_case(
                phantom, phantom.case(case_id), pooling=pooling, n_members=n_members, device=CPU, with_labels=True
            )  # type: ignore[arg-type]
            log_q = torch.log_softmax(case.logits.double(), 0)
            if method is not None:
                flat = case.logits.double().reshape(case.logits.shape[0], -1).T
                calibrated = fitted[method].calibrator.log_probs(flat)  # type: ignore[union-attr]
                log_q = calibrated.T.reshape(case.logits.shape)
            assert case.labels is not None
            nll = float(-log_q.gather(0, case.labels[None]).mean())
            flips = float((log_q.argmax(0) != case.decision).double().mean())
            row = next(r for r in result.records.rows if (r.pipeline, r.case) == (pipeline, case_id))
            assert row.values["nll"] == pytest.approx(nll, rel=1e-5)
            assert row.values["flip"] == pytest.approx(flips, abs=1e-12)


def test_preserving_pipelines_keep_every_label_and_the_pooled_dice(result) -> None:  # type: ignore[no-untyped-def]
    by_name = {p["name"]: p["metrics"] for p in result.summary["pipelines"]}
    for name in ("ts(z)", "cms_ap(z)"):
        assert by_name[name]["flip"]["mean"] == 0.0
        assert by_name[name]["dsc"]["mean"] == by_name["uncalibrated(z)"]["dsc"]["mean"]
    assert by_name["ms(z)"]["flip"]["mean"] > 0


def test_flips_against_another_pooling_are_not_mixed_up(result) -> None:  # type: ignore[no-untyped-def]
    """p0 has its own decision; counted against the ensemble's it would flip many voxels."""
    by_name = {p["name"]: p["metrics"] for p in result.summary["pipelines"]}
    assert by_name["p0"]["flip"]["mean"] == by_name["uncalibrated(p)"]["flip"]["mean"] == 0.0
    assert by_name["p0"]["dsc"]["mean"] != by_name["uncalibrated(z)"]["dsc"]["mean"]


def test_poolings_of_one_read_are_those_of_separate_reads(phantom: Manifest) -> None:
    case = phantom.cases[0]
    wanted = [Want("logits"), Want("probabilities"), Want("logits", 1)]
    together = load_poolings(phantom, case, wanted, device=CPU, with_labels=True)
    for want, data in zip(wanted, together, strict=True):
        alone = load_case(phantom, case, pooling=want.pooling, n_members=want.n_members, device=CPU, with_labels=True)
        assert torch.equal(data.logits, alone.logits)
        assert torch.equal(data.decision, alone.decision)


def test_a_folder_that_cannot_be_made_is_an_error_with_a_way_out(result, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot be written: .*choose another path"):
        result.save(tmp_path / "file" / "results")


def test_pictures_of_earlier_results_do_not_stay(result, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "gone.npz").write_bytes(b"of a case that is measured no more")
    result.save(tmp_path)
    assert sorted(path.stem for path in (tmp_path / "pictures").iterdir()) == sorted(result.pictures)


def test_files_read_back_exactly_and_tables_mark_the_best(result, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    result.save(tmp_path)
    loaded = Records.load(tmp_path)
    for mine, theirs in zip(result.records.rows, loaded.rows, strict=True):
        assert (mine.repeat, mine.pipeline, mine.case, mine.group) == (
            theirs.repeat,
            theirs.pipeline,
            theirs.case,
            theirs.group,
        )
        for column, value in mine.values.items():
            assert theirs.values[column] == value or (math.isnan(value) and math.isnan(theirs.values[column]))
        for name, table in theirs.tables.items():
            np.testing.assert_array_equal(table, mine.tables[name])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["n_cases"] == 3
    assert {"mean", "low", "high", "by_subject"} <= set(summary["pipelines"][0]["metrics"]["nll"])
    markdown = (tmp_path / "table.md").read_text()
    best = min(summary["pipelines"], key=lambda p: p["metrics"]["nll"]["mean"])
    assert f"| {best['name']} | **{cell(best, 'nll')}** |" in markdown
    assert "ACE: all cases pooled, without brackets" in markdown  # a range over one repeat would be none
    assert r"\textbf{" in (tmp_path / "table.tex").read_text()
    rows = list(csv.DictReader((tmp_path / "differences.csv").read_text().splitlines()))
    pair = next(r for r in rows if (r["first"], r["second"], r["metric"]) == ("ts(z)", "uncalibrated(z)", "nll"))
    means = {p["name"]: p["metrics"]["nll"]["mean"] for p in summary["pipelines"]}
    assert float(pair["difference"]) == pytest.approx(means["ts(z)"] - means["uncalibrated(z)"], abs=1e-12)
    assert float(pair["low"]) <= float(pair["difference"]) <= float(pair["high"])


def test_flips_that_cannot_happen_are_a_dash(result) -> None:  # type: ignore[no-untyped-def]
    by_name = {p["name"]: p for p in result.summary["pipelines"]}
    assert cell(by_name["cms_ap(z)"], "flip") == cell(by_name["p0"], "flip") == "—"
    assert cell(by_name["ms(z)"], "flip") != "—"
    assert markdown_table(result.summary).count("—") == 5
    assert latex_table(result.summary).count("---") == 5


def test_a_name_of_any_signs_stays_in_its_cell(result) -> None:  # type: ignore[no-untyped-def]
    summary = copy.deepcopy(result.summary)
    summary["pipelines"][-1]["name"] = r"a|b & #1_{x}$ 5% \o ~^"
    row = markdown_table(summary).splitlines()[-1]
    assert row.startswith(r"| a\|b & #1_{x}$ 5% \o ~^ | ")
    row = latex_table(summary).splitlines()[-3]
    assert row.startswith(r"a|b \& \#1\_\{x\}\$ 5\% \textbackslash{}o \textasciitilde{}\textasciicircum{} & ")


def test_groups_of_the_manifest_get_their_own_table(phantom: Manifest, fitted: dict[str, FittedCalibrator]) -> None:
    whole = evaluate(phantom, [fitted["ts"]], bootstrap=QUICK, device=CPU).summary
    assert set(whole["groups"]) == {"site_a", "site_b"}
    assert "Group site_b:" in markdown_table(whole)
    for column in HEADLINE:
        assert column in whole["groups"]["site_b"][0]["metrics"]


def test_same_input_gives_the_same_bytes(
    phantom: Manifest, fitted: dict[str, FittedCalibrator], tmp_path: Path
) -> None:
    from tests.evaluation.conftest import files_below

    for name in ("one", "two"):
        evaluate(phantom, [fitted["ms"]], split=1, bootstrap=QUICK, device=CPU).save(tmp_path / name)
    assert files_below(tmp_path / "one") == files_below(tmp_path / "two")


def test_a_broken_case_is_an_error_or_is_left_out_and_named(
    phantom: Manifest, fitted: dict[str, FittedCalibrator], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = phantom.splits[0].test[1]
    original = cases.read_member

    def failing(path: Path, **options: object) -> object:
        if broken in str(path):
            raise DataError(f"{path}: broken on purpose")
        return original(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(cases, "read_member", failing)
    with pytest.raises(DataError, match="broken on purpose"):
        evaluate(phantom, [fitted["ts"]], split=0, bootstrap=QUICK, device=CPU)
    result = evaluate(phantom, [fitted["ts"]], split=0, bootstrap=QUICK, device=CPU, keep_going=True)
    assert set(result.failed) == {broken}
    assert result.summary["n_cases"] == 2


def test_two_calibrators_of_one_name_are_refused(phantom: Manifest, fitted: dict[str, FittedCalibrator]) -> None:
    with pytest.raises(UsageError, match=r"both called ts\(z\)"):
        evaluate(phantom, [fitted["ts"], fitted["ts"]], split=0, bootstrap=QUICK, device=CPU)


def test_a_single_model_has_no_separate_p0(phantom: Manifest) -> None:
    from segcal.evaluation.plan import first_members

    assert [p.name for p in baselines(first_members(phantom, 1))] == ["uncalibrated(z)"]


def test_the_pictured_slice_shows_the_case(result, phantom: Manifest) -> None:  # type: ignore[no-untyped-def]
    assert set(result.pictures) == set(phantom.splits[0].test)
    assert result.summary["pictured"] == "cms_ap(z)"
    for case_id, picture in result.pictures.items():
        data = load_case(phantom, phantom.case(case_id), pooling="logits", device=CPU, with_labels=True)
        np.testing.assert_array_equal(picture.maps.segmentation[0], data.decision[picture.index].numpy())
        assert not picture.maps.flips.any()


def test_measuring_on_the_cases_of_the_fit_is_said_to_flatter(
    phantom: Manifest, fitted: dict[str, FittedCalibrator]
) -> None:
    everywhere = evaluate(phantom, [fitted["ts"]], bootstrap=QUICK, device=CPU)
    assert any("the numbers are too good" in text for text in everywhere.summary["warnings"])
    held_out = evaluate(phantom, [fitted["ts"]], split=0, bootstrap=QUICK, device=CPU)
    assert not any("the numbers are too good" in text for text in held_out.summary["warnings"])


def test_calibration_cases_are_known_by_their_numbers_whatever_the_manifest_is_called(
    phantom: Manifest, fitted: dict[str, FittedCalibrator]
) -> None:
    split = phantom.splits[0]
    chosen = [split.calibration[0], split.test[0]]
    found = evaluate(phantom, fitted, cases=chosen, bootstrap=QUICK, device=CPU)
    told = [text for text in found.summary["warnings"] if "the numbers are too good" in text]
    assert len(told) == 1
    assert f"fitted on 1 case of those measured ({split.calibration[0]})" in told[0]
    assert all(name in told[0].split(":")[0].split(", ") for name in fitted)


def test_each_calibrator_is_told_by_what_it_was_fitted_on(
    phantom: Manifest, fitted: dict[str, FittedCalibrator]
) -> None:
    """One by this manifest, one by its cases under another; `identity` was fitted on nothing."""
    ts, other = fitted["ts"], fitted["cms_ap"]
    plain = fit_many(phantom, ["identity"], split=0, device="cpu")["identity"]
    elsewhere = replace(other, info=other.info.model_copy(update={"manifest_sha256": "0" * 64}))
    chosen = {"here": ts, "elsewhere": elsewhere, "plain": plain}
    found = evaluate(phantom, chosen, bootstrap=QUICK, device=CPU).summary["warnings"]
    told = [text.split(":")[0] for text in found if "the numbers are too good" in text]
    assert told == ["here", "elsewhere"]


def test_calibrators_on_each_member_have_rows_of_their_own(
    phantom: Manifest, fitted: dict[str, FittedCalibrator]
) -> None:
    """NLL of the mean over members of softmax(z / T), by a literal loop over the member files."""
    ts = fitted["ts"]
    with_rows = evaluate(phantom, [ts], split=0, each_member=True, bootstrap=QUICK, device=CPU)
    rows = {p["name"]: p for p in with_rows.summary["pipelines"]}
    assert list(rows) == ["p0", "uncalibrated(p)", "uncalibrated(z)", "ts(z)", "ts(members)"]
    assert rows["ts(members)"]["pooling"] == "members-probabilities"
    assert rows["ts(members)"]["preserves"] is None
    assert any("applied to each member alone" in text for text in with_rows.summary["warnings"])
    compared = {(d["first"], d["second"]) for d in with_rows.summary["differences"]}
    assert ("ts(members)", "uncalibrated(p)") in compared

    temperature = float(ts.calibrator.tensors()["temperature"])  # type: ignore[union-attr]
    expected = {}
    for case_id in phantom.splits[0].test:
        case = phantom.case(case_id)
        labelled = load_case(phantom, case, pooling="logits", device=CPU, with_labels=True)
        assert labelled.labels is not None
        total = torch.zeros_like(labelled.logits, dtype=torch.float64)
        for name in case.members:
            member = cases.read_member(phantom.resolve(name), kind=phantom.kind, axes=phantom.axes)
            total += torch.softmax(torch.as_tensor(member.values).double() / temperature, 0)
        picked = (total / len(case.members)).gather(0, labelled.labels.clamp(min=0)[None])[0]
        seen = labelled.labels >= 0
        expected[case_id] = float(-picked[seen].log().mean())
    measured = {r.case: r.values["nll"] for r in with_rows.records.rows if r.pipeline == "ts(members)"}
    assert measured == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("n_bytes", [1 << 12, 1 << 16, 1 << 30])
def test_no_memory_for_chunks_changes_a_bit_of_a_result(
    result,  # type: ignore[no-untyped-def]
    phantom: Manifest,
    fitted: dict[str, FittedCalibrator],
    n_bytes: int,
) -> None:
    with chunk_budget(n_bytes):
        again = evaluate(phantom, list(fitted.values()), split=0, bootstrap=QUICK, device=CPU)
    assert [(r.case, r.pipeline, r.values) for r in again.records.rows] == [
        (r.case, r.pipeline, r.values) for r in result.records.rows
    ]
    for one, other in zip(again.records.rows, result.records.rows, strict=True):
        for name, table in one.tables.items():
            assert table.tobytes() == other.tables[name].tobytes(), name


def test_decisions_of_an_evaluation_are_kept_in_bytes(phantom: Manifest) -> None:
    wide, narrow = (
        load_poolings(phantom, phantom.cases[0], [Want("logits")], device=CPU, with_labels=True, narrow=narrow)[0]
        for narrow in (False, True)
    )
    assert (wide.decision.dtype, narrow.decision.dtype) == (torch.int64, torch.uint8)
    assert torch.equal(wide.decision, narrow.decision.long())


def test_stored_zeros_are_counted_once_whichever_pipelines_are_measured(tmp_path: Path) -> None:
    manifest = write_ensemble(tmp_path, n_cases=1, kind="probabilities")
    for name in manifest.cases[0].members:
        with np.load(manifest.resolve(name)) as stored:
            values = stored["probabilities"].copy()
        values[:, 0, 0, :10] = np.array([1, 0, 0], dtype=np.float32)[:, None]
        np.savez_compressed(manifest.resolve(name), probabilities=values)
    everything = baselines(manifest)
    for chosen in (everything, everything[1:], everything[2:]):
        settings = MetricSettings(manifest.class_names)
        assert measure_case(manifest, manifest.cases[0], chosen, settings, device=CPU).n_floored == 2 * 2 * 10


def test_a_case_and_a_subject_of_one_name_are_two_subjects(phantom: Manifest) -> None:
    ids = phantom.splits[0].test
    content = phantom.model_dump(mode="json", exclude_none=True)
    del content["splits"]
    for case in content["cases"]:
        case.pop("subject", None)
        if case["id"] == ids[0]:
            case["subject"] = ids[1]
    named = Manifest.from_content(content, phantom.path)
    records = evaluate(named, cases=ids, bootstrap=QUICK, device=CPU).records
    assert {row.case: row.subject for row in records.rows} == {
        ids[0]: f"subject:{ids[1]}",
        ids[1]: f"case:{ids[1]}",
        ids[2]: f"case:{ids[2]}",
    }
