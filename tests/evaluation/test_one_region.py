"""A region model with one region, the plain lesion model: one binary problem is enough for every number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from segcal.errors import ParameterError
from segcal.evaluation.run import Evaluation, evaluate
from segcal.evaluation.study import study
from segcal.evaluation.study_settings import StudySettings
from segcal.evaluation.summary import BootstrapSettings
from segcal.metrics import MetricSettings, make_metrics
from segcal.report.page import evaluation_page
from segcal.report.pooled import PooledTables, class_labels
from segcal.report.results import load_results
from tests.apply_data import random_logits
from tests.qa.batches import labelled

CPU = torch.device("cpu")
IDS = tuple("abcdef")
LESION = {"classes": None, "regions": [{"name": "lesion", "labels": [1]}], "regions_class_order": [1]}
LOG_ODDS = {case: [random_logits(10 * k + m, (1, 4, 5, 6)) for m in range(2)] for k, case in enumerate(IDS)}


def measured(root: Path, *, as_region: bool, times: float = 1.0) -> Evaluation:
    """The same log-odds z as one sigmoid channel, or as a softmax model with the logits (0, z)."""
    one = {case: [z * np.float32(times) for z in members] for case, members in LOG_ODDS.items()}
    two = {case: [np.concatenate([0 * z, z]) for z in members] for case, members in one.items()}
    keys = LESION if as_region else {"classes": ["not lesion", "lesion"]}
    manifest = labelled(root, one if as_region else two, n_labels=2, **keys)
    return evaluate(manifest, [], bootstrap=BootstrapSettings(n_replicates=50), device=CPU)


@pytest.mark.parametrize("times", [1, 10])  # with 10 some p round to 1, and only 1 - p says how wrong they are
def test_one_region_has_the_numbers_of_the_softmax_model_with_the_same_log_odds(tmp_path: Path, times: float) -> None:
    region, softmax = (measured(tmp_path / str(kind), as_region=kind, times=times) for kind in (True, False))
    for mine, theirs in zip(region.summary["pipelines"], softmax.summary["pipelines"], strict=True):
        for column in ("nll", "brier", "dsc", "ece", "ba_ece", "ace"):
            assert mine["metrics"][column]["mean"] == pytest.approx(theirs["metrics"][column]["mean"], rel=1e-5), column


def test_the_diagram_of_the_only_region_is_of_the_voxels_inside_it(tmp_path: Path) -> None:
    result = measured(tmp_path, as_region=True)
    result.save(tmp_path / "results")
    tables = PooledTables.of(result.records, result.summary)
    assert class_labels(result.summary) == ["lesion"]
    table = tables.of_class("uncalibrated(z)", 0)
    assert table is not None
    confusion = result.records.table("confusion", "uncalibrated(z)")
    assert table.hits.sum() == confusion[0, 1].sum()  # voxels labelled lesion, not those outside it
    assert "Reliability diagram, lesion" in evaluation_page(load_results(tmp_path / "results"))


def test_a_study_of_one_region_reaches_its_tables(tmp_path: Path) -> None:
    settings = StudySettings.parse(
        {"pipelines": [{"method": "ts", "pooling": "logits"}], "repeats": 1, "rows": 1000, "replicates": 20},
        source="test",
    )
    study(labelled(tmp_path, LOG_ODDS, n_labels=2, **LESION), settings, tmp_path / "out", device=CPU)
    assert "ts(z)" in (tmp_path / "out" / "table.md").read_text()


def test_a_softmax_model_still_needs_two_classes() -> None:
    with pytest.raises(ParameterError, match="at least two classes"):
        make_metrics(MetricSettings(("lesion",)))
