"""What every metric of the registry has to keep to; a new metric is picked up by itself."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.errors import DataError, GeometryError, ParameterError
from segcal.metrics import METRICS, CaseFrame, CaseResult, MetricSettings, direction, make_metrics
from segcal.metrics.suite import MetricSet
from tests.metrics.cases import CASES, draw_case, measure, settings_for


def case_with_everything(shape: tuple[int, ...] = (5, 11, 13), n_classes: int = 4) -> dict[str, np.ndarray]:
    probs, labels = draw_case(20, shape, n_classes, ignored=0.2)
    decision, deployed = np.random.default_rng(1).integers(0, n_classes, (2, *shape))
    return {"probs": probs, "labels": labels, "decision": decision, "deployed": deployed, "inside": labels != 2}


def frame_of(case: dict[str, np.ndarray], chosen: MetricSettings, chunk_voxels: int) -> CaseFrame:
    maps = {name: torch.from_numpy(case[name]) for name in ("decision", "deployed", "inside")}
    return CaseFrame.build("a", torch.from_numpy(case["labels"]), chosen, chunk=chunk_voxels, **maps)


def assert_same_bits(one: CaseResult, other: CaseResult) -> None:
    assert one.values.keys() == other.values.keys()
    for name, value in one.values.items():
        assert value.hex() == other.values[name].hex(), name
    assert one.undefined == other.undefined
    for name, table in one.tables.items():
        assert table.tobytes() == other.tables[name].tobytes(), name


@settings(max_examples=25)
@given(st.integers(7, 800), st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_chunking_and_any_sharing_out_over_workers_gives_the_same_bits(chunk: int, n_workers: int, random) -> None:  # type: ignore[no-untyped-def]
    case = case_with_everything()
    chosen = settings_for(4)
    probs = torch.from_numpy(case["probs"])
    whole = make_metrics(chosen)
    whole.update(frame_of(case, chosen, 1 << 16), probs)

    batches = list(frame_of(case, chosen, chunk).batches(probs))
    random.shuffle(batches)
    workers = [make_metrics(chosen) for _ in range(n_workers)]
    for k, batch in enumerate(batches):
        for metric in workers[k % n_workers].metrics.values():
            metric.update("a", batch)
    for other in workers[1:]:
        workers[0].merge(other)
    assert_same_bits(workers[0].take("a"), whole.take("a"))


def test_cases_of_other_workers_are_taken_over() -> None:
    chosen = settings_for(4)
    mine, theirs = make_metrics(chosen), make_metrics(chosen)
    for metrics, name in ((mine, "a"), (theirs, "b")):
        probs, labels = draw_case(len(name), (3, 4, 5), 4)
        metrics.update(CaseFrame.build(name, torch.from_numpy(labels), chosen), torch.from_numpy(probs))
    mine.merge(theirs)
    for metric in mine.metrics.values():
        assert set(metric.compute()) == {"a", "b"}


@pytest.mark.parametrize("name", sorted(METRICS))
def test_states_of_other_settings_are_not_mixed(name: str) -> None:
    with pytest.raises(ParameterError, match="settings"):
        METRICS[name](settings_for(3)).merge(METRICS[name](settings_for(3, ece_bins=20)))


def test_with_all_voxels_ignored_every_number_is_undefined_and_says_why() -> None:
    case = case_with_everything()
    case["labels"][:] = -1
    result = measure(**case)  # type: ignore[arg-type]
    numbers = {name: value for name, value in result.values.items() if not name.startswith("n_")}
    assert all(math.isnan(value) for value in numbers.values()), numbers
    assert set(result.undefined) == set(numbers)
    assert all(result.undefined.values())
    assert result.values["n_voxels"] == 0


@pytest.mark.parametrize("name", sorted(METRICS))
def test_compute_says_the_same_as_the_case_result(name: str) -> None:
    chosen = settings_for(4)
    case = case_with_everything()
    case["labels"][case["labels"] == 3] = 0
    metric = METRICS[name](chosen)
    for batch in frame_of(case, chosen, 100).batches(torch.from_numpy(case["probs"])):
        metric.update("a", batch)
    values = metric.compute()["a"]
    result = MetricSet({name: metric}).take("a")
    assert values == pytest.approx(result.values, abs=0, nan_ok=True)
    assert {column for column, value in values.items() if math.isnan(value)} == set(result.undefined)


@pytest.mark.parametrize("name", sorted(METRICS))
def test_every_metric_says_which_way_its_columns_get_better(name: str) -> None:
    columns = METRICS[name].directions
    assert columns
    assert all(direction(column) == way for column, way in columns.items())


def test_direction_knows_class_columns_and_refuses_others() -> None:
    assert direction("dsc:anterior") == "higher"
    assert direction("ece") == "lower"
    with pytest.raises(ParameterError, match="n_voxels"):
        direction("n_voxels")


def test_a_case_result_is_small_can_be_sent_and_leaves_no_state_behind() -> None:
    chosen = settings_for(4)
    metrics = make_metrics(chosen)
    case = case_with_everything()
    metrics.update(frame_of(case, chosen, 1 << 16), torch.from_numpy(case["probs"]))
    result = metrics.take("a")
    assert not any(metric.states for metric in metrics.metrics.values())
    stored = pickle.dumps(result)
    assert len(stored) < 40_000
    assert_same_bits(pickle.loads(stored), result)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_inputs_are_not_changed(dtype: type[np.floating]) -> None:
    case = case_with_everything()
    case["probs"] = case["probs"].astype(dtype)
    before = {name: array.copy() for name, array in case.items()}
    measure(**case)  # type: ignore[arg-type]
    for name, array in case.items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("name", ["3d", "2d", "2d as 3d"])
def test_the_shape_of_the_grid_changes_nothing_but_the_boundary(name: str) -> None:
    probs, labels = CASES[name]()
    shaped = measure(probs, labels).values
    flat = measure(probs.reshape(len(probs), -1), labels.reshape(-1), spatial=False).values
    for column in ("nll", "brier", "dsc", "ece", "mce", "classwise_ece", "equal_mass_ece"):
        assert shaped[column] == flat[column]


def test_half_precision_probabilities_are_widened() -> None:
    probs, labels = draw_case(2, (4, 5, 6), 3)
    half = probs.astype(np.float16)
    assert measure(half, labels).values == pytest.approx(measure(half.astype(np.float32), labels).values, nan_ok=True)


def broken(kind: str) -> tuple[np.ndarray, np.ndarray, type[Exception], str]:
    probs, labels = draw_case(2, (4, 5, 6), 3)
    error: type[Exception] = DataError
    if kind == "nan":
        probs[2, 1, 1, 1] = np.nan
    elif kind == "nan everywhere in a voxel":
        probs[:, 1, 1, 1] = np.nan
    elif kind == "logits":
        probs = np.log(probs)
    elif kind == "large logits":
        probs = probs * 30
    elif kind == "not summing to one":
        probs[:, 0, 0, 0] = 0.4
    elif kind == "a label too many":
        labels[0, 0, 0] = 3
    elif kind == "an unknown negative label":
        labels[0, 0, 0] = -2
    elif kind == "fractional labels":
        labels = labels.astype(np.float64)
    else:
        probs, error = probs[:, :-1], GeometryError
    return probs, labels, error, "case"


KINDS = (
    "nan",
    "nan everywhere in a voxel",
    "logits",
    "large logits",
    "not summing to one",
    "a label too many",
    "an unknown negative label",
    "fractional labels",
    "another grid",
)


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_measured_is_an_error_that_names_the_case(kind: str) -> None:
    probs, labels, error, name = broken(kind)
    with pytest.raises(error, match=name):
        measure(probs, labels)


@pytest.mark.parametrize("which", ["decision", "deployed", "inside"])
def test_maps_on_another_grid_are_refused(which: str) -> None:
    case = case_with_everything()
    case[which] = case[which][:-1]
    with pytest.raises(GeometryError, match="case"):
        measure(**case)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes", [{"ece_bins": 0}, {"band_edges": (0.0, 5.0, 5.0)}, {"band_edges": (1.0,)}, {"band_edges": ()}]
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ParameterError):
        settings_for(3, **changes)
