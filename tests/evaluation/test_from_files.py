"""From files to numbers: crop, ignored voxels and both poolings against plain loops in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from segcal.evaluation.run import evaluate
from segcal.evaluation.summary import BootstrapSettings
from segcal.types import IGNORED
from tests.apply_data import random_logits
from tests.metrics import reference
from tests.qa.batches import labelled

CROP = ((0, 3), (1, 5), (0, 4))
IDS = ("a", "b", "c")


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=0))
    return e / e.sum(axis=0)


def test_cropped_cases_with_ignored_voxels_have_the_numbers_of_plain_loops(tmp_path: Path) -> None:
    members = {case: [random_logits(10 * k + m) for m in range(2)] for k, case in enumerate(IDS)}
    manifest = labelled(tmp_path, members, n_labels=4, ignore_label=3, crop=CROP)
    found = evaluate(manifest, [], bootstrap=BootstrapSettings(n_replicates=20), device=torch.device("cpu"))
    values = {(row.pipeline, row.case): row.values for row in found.records.rows}

    labels = np.random.default_rng(7).integers(0, 4, members["a"][0].shape[1:])
    labels[labels == 3] = IGNORED
    outside = np.ones(labels.shape, dtype=bool)
    outside[tuple(slice(*side) for side in CROP)] = False
    pooled = {
        "uncalibrated(z)": lambda z: softmax(np.mean(z, axis=0, dtype=np.float64)),
        "uncalibrated(p)": lambda z: np.mean([softmax(one.astype(np.float64)) for one in z], axis=0),
    }
    for pipeline, pool in pooled.items():
        cases = []
        for case in IDS:
            probs = pool(members[case])
            probs[:, outside] = np.array([1.0, 0.0, 0.0])[:, None]
            cases.append((probs, labels))
            expected = {
                "nll": reference.nll(probs, labels),
                "brier": reference.brier(probs, labels),
                "ece": reference.ece(probs, labels, 50),
                "ba_ece": reference.ba_ece(probs, labels),
                "classwise_ece": np.mean(reference.classwise_ece(probs, labels, 50)),
                "dsc": np.mean(reference.dice(probs, labels)[1:]),
            }
            got = {column: values[pipeline, case][column] for column in expected}
            assert got == pytest.approx(expected, rel=1e-5), (pipeline, case)
        summary = next(p for p in found.summary["pipelines"] if p["name"] == pipeline)
        assert summary["metrics"]["ace"]["mean"] == pytest.approx(reference.ace(cases, 15), rel=1e-5)
