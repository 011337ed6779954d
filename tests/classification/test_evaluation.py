"""Evaluate, apply and fit on data files: what the numbers and files promise."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from segcal.classification import apply, evaluate, fit_methods, load_data
from segcal.classification.data import data_from_arrays
from segcal.classification.evaluation import RowPipeline, evaluate_pipelines
from segcal.classification.metrics import METRICS, OOD_METRICS, ScoredRows, measure, measure_ood
from segcal.classification.running import takes
from segcal.errors import DataError, MismatchError, OutputError, UsageError
from segcal.evaluation.summary import BootstrapSettings
from tests.classification.files_data import drawn, saved, with_foreign

QUICK = BootstrapSettings(n_replicates=100)


def softmax(logits: np.ndarray) -> np.ndarray:
    return torch.softmax(torch.from_numpy(logits), 1).numpy()


def test_a_fitted_temperature_is_shown_to_improve_and_found_again() -> None:
    fitted = fit_methods(drawn(0, 3000), ["ts"])
    result = evaluate(drawn(1, 3000), fitted, bootstrap=QUICK)
    before, after = result.summary["pipelines"]

    assert after["metrics"]["nll"]["mean"] < before["metrics"]["nll"]["mean"]
    nll = next(d for d in result.summary["differences"] if d["metric"] == "nll")
    assert (nll["first"], nll["second"]) == ("ts", "uncalibrated")
    assert nll["high"] < 0
    assert after["metrics"]["accuracy"] == before["metrics"]["accuracy"]
    assert after["metrics"]["flip"]["mean"] == 0.0


def test_every_value_is_the_metric_of_the_known_rows() -> None:
    arrays = with_foreign(drawn(2, 400), 60)
    summary = evaluate(arrays, bootstrap=QUICK).summary
    found = summary["pipelines"][0]["metrics"]
    probabilities = softmax(arrays["logits"])

    expected = measure(ScoredRows.of(probabilities[:400], arrays["labels"][:400]))
    expected |= measure_ood(probabilities.max(1), arrays["ood"])
    assert set(found) == {*METRICS, *OOD_METRICS, "flip"}
    for name, value in expected.items():
        assert found[name]["mean"] == pytest.approx(value, abs=1e-12), name
    assert found["ood_auroc"]["mean"] > 0.6
    assert (summary["n_rows"], summary["data"]["n_ood"]) == (400, 60)


def test_the_summary_has_the_shape_of_every_summary() -> None:
    summary = evaluate(drawn(3, 100), fit_methods(drawn(4, 200), ["ts"]), bootstrap=QUICK).summary
    assert {"pipelines", "n_cases", "n_repeats", "n_bootstrap", "settings", "differences"} <= set(summary)
    for pipeline in summary["pipelines"]:
        assert {"name", "method", "metrics"} <= set(pipeline)
        assert all({"mean", "low", "high"} <= set(values) for values in pipeline["metrics"].values())


def test_all_files_are_the_same_bytes_again_and_the_page_stands_alone(tmp_path: Path) -> None:
    fitted = fit_methods(drawn(5, 300), ["ts"])
    names = ["bins.npz", "classes.csv", "differences.csv", "report.html", "rows.npz", "summary.json"]
    for run in ("a", "b"):
        evaluate(drawn(6, 200), fitted, bootstrap=QUICK).save(tmp_path / run)
    found = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert sorted(found) == [*names, "table.md", "table.tex"]
    assert found == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    page = found["report.html"].decode()
    assert "http" not in page.replace("http-equiv", "")
    assert "uncalibrated" in found["table.md"].decode()


def test_rows_and_bins_on_disk_are_those_of_the_summary(tmp_path: Path) -> None:
    result = evaluate(drawn(7, 150), fit_methods(drawn(8, 300), ["ts"]), bootstrap=QUICK)
    result.save(tmp_path, page=False)
    with np.load(tmp_path / "rows.npz") as rows, np.load(tmp_path / "bins.npz") as bins:
        assert rows["nll"].shape == (2, 150)
        np.testing.assert_allclose(
            rows["nll"].mean(1), [p["metrics"]["nll"]["mean"] for p in result.summary["pipelines"]], atol=1e-9
        )
        counts, sums, hits = np.moveaxis(bins["top_label"], 1, 0)
        assert counts.sum(1).tolist() == [150, 150]
        np.testing.assert_allclose(
            np.abs(sums - hits).sum(1) / 150, [p["metrics"]["ece"]["mean"] for p in result.summary["pipelines"]]
        )
    assert len((tmp_path / "classes.csv").read_text().splitlines()) == 1 + 2 * 4
    assert not (tmp_path / "report.html").exists()


def test_rows_of_a_subject_are_drawn_together() -> None:
    few = drawn(9, 40)
    repeated = {name: np.repeat(array, 10, axis=0) for name, array in few.items()}
    by_subject = {**repeated, "subject": np.repeat(np.arange(40), 10)}
    one, two = (evaluate(arrays, bootstrap=QUICK).summary for arrays in (repeated, by_subject))
    assert one["resampled"]["what"] == "rows"
    assert two["resampled"] == {"what": "subjects", "n": 40, "n_units": 40}
    widths = [s["pipelines"][0]["metrics"]["nll"] for s in (one, two)]
    assert widths[1]["high"] - widths[1]["low"] > 2 * (widths[0]["high"] - widths[0]["low"])
    assert any("repeat the scores" in text for text in one["warnings"])


def test_local_errors_are_measured_where_there_are_features(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = drawn(10, 200)
    arrays["features"] = np.random.default_rng(0).normal(size=(200, 5))
    found = evaluate(arrays, bootstrap=QUICK).summary["pipelines"][0]["metrics"]
    assert 0 < found["lce"]["mean"] < found["mlce"]["mean"]
    monkeypatch.setattr("segcal.classification.evaluation.MOST_LOCAL_ROWS", 100)
    found = evaluate(arrays, bootstrap=QUICK).summary["pipelines"][0]["metrics"]
    assert found["lce"]["mean"] is None
    assert "square" in found["lce"]["reason"]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"logits": np.zeros((50, 3)), "labels": np.arange(50) % 3}, "All rows have the same scores"),
        ({"logits": drawn(11, 50, 6)["logits"], "labels": np.zeros(50, dtype=int)}, "No row is labelled 1, 2, 3, 4, 5"),
        ({"logits": drawn(12, 50, 20)["logits"], "labels": np.arange(50) % 20}, "Fewer than 10 rows"),
        ({"probabilities": np.tile([1.0, 0.0], (30, 1)), "labels": np.arange(30) % 2}, "87.3 nats"),
    ],
)
def test_awkward_rows_give_finite_numbers_and_a_warning(
    tmp_path: Path, arrays: dict[str, np.ndarray], words: str
) -> None:
    result = evaluate(arrays, bootstrap=QUICK)
    assert any(words in text for text in result.summary["warnings"]), result.summary["warnings"]
    for values in result.summary["pipelines"][0]["metrics"].values():
        assert math.isfinite(values["mean"])
    result.save(tmp_path, page="scores" in words)  # one page is enough: all make it in the same way
    assert not (page := tmp_path / "report.html").exists() or words in page.read_text()


@pytest.mark.parametrize(("n", "n_classes"), [(1, 2), (2, 2), (50, 2), (50, 1000)])
def test_few_rows_and_many_classes_are_measured(tmp_path: Path, n: int, n_classes: int) -> None:
    result = evaluate(drawn(13, n, n_classes), bootstrap=BootstrapSettings(n_replicates=20))
    assert all(math.isfinite(v["mean"]) for v in result.summary["pipelines"][0]["metrics"].values())
    result.save(tmp_path, page=n == 1)


def test_numbers_on_the_rows_of_the_fit_come_with_a_warning() -> None:
    arrays = drawn(14, 200)
    fitted = fit_methods(arrays, ["ts"])
    assert any("these very rows" in text for text in evaluate(arrays, fitted, bootstrap=QUICK).summary["warnings"])
    assert not evaluate(drawn(15, 200), fitted, bootstrap=QUICK).summary["warnings"]


def test_foreign_rows_never_reach_a_fit() -> None:
    plain = drawn(16, 300)
    one, two = fit_methods(plain, ["ts"])["ts"], fit_methods(with_foreign(plain, 80), ["ts"])["ts"]
    for name, tensor in one.method.tensors().items():
        assert torch.equal(tensor, two.method.tensors()[name])


def test_apply_writes_what_the_method_gives_and_says_what_it_did(tmp_path: Path) -> None:
    path = saved(tmp_path / "test.npz", with_foreign(drawn(17, 100), 20))
    fitted = fit_methods(drawn(18, 300), ["ts"])["ts"]
    record = apply(fitted, path, tmp_path / "out")

    again = load_data(tmp_path / "out" / record["output"])
    expected = fitted.probabilities(load_data(path).samples)
    np.testing.assert_allclose(again.samples.logits.exp().numpy(), expected.numpy(), rtol=1e-12)
    assert json.loads((tmp_path / "out" / "run.json").read_text()) == record
    assert (record["n_rows"], record["n_changed"], record["method"]) == (120, 0, "ts")
    with pytest.raises(OutputError, match="own input"):
        apply(fitted, tmp_path / "out" / "calibrated.npz", tmp_path / "out")


def test_settings_go_to_the_methods_that_have_them_and_others_are_refused() -> None:
    arrays = drawn(19, 200)
    fitted = fit_methods(arrays, ["ts", "dc", "histogram"], settings={"lambda_": 1.0, "mu": 0.5, "bins": 7})
    assert (fitted["dc"].info.lambda_, fitted["dc"].info.mu) == (1.0, 0.5)
    assert fitted["ts"].info.lambda_ is None
    assert fitted["histogram"].info.settings is not None
    assert fitted["histogram"].info.settings["bins"] == 7
    with pytest.raises(UsageError, match="`lambda` means nothing for ts"):
        fit_methods(arrays, ["ts"], settings={"lambda_": 1.0})
    with pytest.raises(UsageError, match="`lamda` means nothing"):
        fit_methods(arrays, ["dc"], settings={"lamda": 1.0})
    with pytest.raises(UsageError, match="between 0 and 1"):
        fit_methods(arrays, ["dc"], validation=1.5)
    assert takes("dc", "validation")
    assert not takes("ts", "validation")


def test_validation_rows_or_a_share_are_used_for_tuning() -> None:
    arrays, judge = drawn(20, 200), drawn(21, 200)
    shared = fit_methods(arrays, ["dc"], validation=0.3, settings={"trials": 3})["dc"]
    given = fit_methods(arrays, ["dc"], validation=judge, settings={"trials": 3})["dc"]
    assert shared.info.validation_nll is not None
    assert given.info.validation_nll is not None
    assert shared.info.validation_nll != given.info.validation_nll


def test_wrong_inputs_are_named() -> None:
    fitted = fit_methods(drawn(22, 100), ["ts"])
    unlabelled = {"logits": drawn(23, 10)["logits"]}
    for call in (lambda: evaluate(unlabelled), lambda: fit_methods(unlabelled, ["ts"])):
        with pytest.raises(DataError, match="has no labels"):
            call()
    with pytest.raises(MismatchError, match="classes differ"):
        evaluate(drawn(24, 20, 5), fitted)
    with pytest.raises(UsageError, match="both called ts"):
        evaluate(drawn(25, 20), [fitted["ts"], fitted["ts"]])
    with pytest.raises(UsageError, match="3 different class names"):
        evaluate(drawn(26, 20), classes=["a", "b", "c"])
    rows = data_from_arrays(drawn(27, 20))
    twice = RowPipeline("uncalibrated", "ts", torch.softmax(rows.samples.logits, 1), "order", True, (), "ab")
    with pytest.raises(UsageError, match="both called uncalibrated"):
        evaluate_pipelines(rows, [twice])
