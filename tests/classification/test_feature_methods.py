"""What all methods that look at features promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from segcal.classification.base import MOST_FEATURE_ROWS, RowMethod
from segcal.classification.drawing import some_rows
from segcal.classification.files import fit, settings_of
from segcal.classification.local_nets import LocalNets
from segcal.classification.mac_cal import MaskedClassifier
from segcal.classification.methods import METHODS as REGISTRY
from segcal.classification.samples import Samples
from segcal.classification.vq import LocalDirichletCalibration, QuantisedDirichlet, QuantisedHead
from segcal.errors import DataError, MismatchError, ParameterError
from tests.classification.feature_rows import AWKWARD, awkward_rows, draw_rows

SHORT = {"max_steps": 40, "patience": 20, "batch_rows": 32}
METHODS: list[tuple[type[RowMethod], dict[str, Any]]] = [
    (LocalDirichletCalibration, SHORT),
    (QuantisedDirichlet, SHORT),
    (QuantisedHead, SHORT),
    (LocalNets, SHORT),
    (MaskedClassifier, {"epochs": 4, "gamma": 0.9, "width": 16}),
]
each_method = pytest.mark.parametrize(("method", "short"), METHODS, ids=[method.name for method, _ in METHODS])


@each_method
def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(method: Any, short: dict[str, Any]) -> None:
    rows = draw_rows()
    torch.manual_seed(1)
    first = method.fit(rows, seed=3, **short).tensors()
    torch.manual_seed(2)
    again, other = method.fit(rows, seed=3, **short).tensors(), method.fit(rows, seed=4, **short).tensors()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@each_method
def test_a_method_survives_its_tensors(method: Any, short: dict[str, Any]) -> None:
    fitted, new = method.fit(draw_rows(), **short), draw_rows(1)
    restored = method.from_tensors({name: value.clone() for name, value in fitted.tensors().items()})
    assert torch.equal(fitted.probabilities(new), restored.probabilities(new))
    for name in fitted.tensors():
        less = {key: value for key, value in fitted.tensors().items() if key != name}
        with pytest.raises(ParameterError, match=name):
            method.from_tensors(less)
        with pytest.raises(ParameterError, match=name):
            method.from_tensors(less | {name: torch.full_like(fitted.tensors()[name], torch.nan)})


@each_method
@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_data_give_finite_probabilities(method: Any, short: dict[str, Any], kind: str) -> None:
    rows = awkward_rows(kind)
    if kind == "a thousand classes":
        short = short | ({"max_steps": 1} if "max_steps" in short else {})
    probs = method.fit(rows, **short).probabilities(rows)
    assert probs.dtype == torch.float64
    assert probs.shape == (rows.n_rows, rows.n_classes)
    assert bool(torch.isfinite(probs).all())
    assert bool((probs >= 0).all())
    torch.testing.assert_close(probs.sum(1), torch.ones(rows.n_rows, dtype=torch.float64), rtol=0, atol=1e-12)


@each_method
def test_a_row_does_not_depend_on_the_rows_beside_it(method: Any, short: dict[str, Any]) -> None:
    fitted, new = method.fit(draw_rows(), **short), draw_rows(1, n=30)
    alone = torch.cat([fitted.probabilities(new.rows(torch.tensor([i]))) for i in range(30)])
    torch.testing.assert_close(fitted.probabilities(new), alone, rtol=0, atol=1e-12)
    assert fitted.probabilities(new.rows(torch.tensor([], dtype=torch.int64))).shape == (0, 3)


@each_method
def test_a_constant_added_to_the_logits_changes_nothing(method: Any, short: dict[str, Any]) -> None:
    assert method.translation_invariant
    rows = draw_rows(n_classes=12)  # above 10 classes local_nets has one factor a class
    moved = Samples.of(rows.logits + 7, rows.labels, rows.features)
    fitted = method.fit(rows, **short)
    torch.testing.assert_close(fitted.probabilities(rows), fitted.probabilities(moved), rtol=0, atol=1e-9)


@each_method
def test_the_scale_of_the_features_does_not_matter(method: Any, short: dict[str, Any]) -> None:
    # A power of two is exact in floating point, so the two fits see the same numbers after their own scaling.
    small, large = draw_rows(), draw_rows(scale=1024.0)
    one, two = method.fit(small, **short).probabilities(small), method.fit(large, **short).probabilities(large)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-9)


@each_method
def test_other_features_than_those_of_the_fit_are_refused(method: Any, short: dict[str, Any]) -> None:
    fitted = method.fit(draw_rows(), **short)
    with pytest.raises(MismatchError, match="size 8, these rows have 6"):
        fitted.probabilities(draw_rows(n_features=6))
    with pytest.raises(DataError, match="features"):
        fitted.probabilities(Samples.of(torch.zeros(2, 3)))


@each_method
def test_a_misspelt_setting_is_refused(method: Any, short: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="learning_speed"):
        method.fit(draw_rows(), learning_speed=1.0)


@each_method
def test_the_fit_changes_neither_the_rows_nor_the_random_numbers_of_others(method: Any, short: dict[str, Any]) -> None:
    rows = draw_rows()
    before, state = [rows.logits.clone(), rows.known_features.clone()], torch.get_rng_state()
    method.fit(rows, **short)
    assert torch.equal(before[0], rows.logits)
    assert torch.equal(before[1], rows.known_features)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", [name for name, method in REGISTRY.items() if method.needs_features])
def test_a_fit_with_features_sees_at_most_max_rows_and_says_so(name: str) -> None:
    rows, short = (
        draw_rows(n=300),
        {key: 5 for key in ("max_steps", "epochs", "steps") if key in settings_of(REGISTRY[name])},
    )
    every = fit(name, rows, **short)
    assert every.info.warnings == ()
    some = fit(name, rows, max_rows=120, **short)
    assert some.info.warnings[0].startswith("fitted on 120 rows drawn from the 300")
    assert some.info.settings["max_rows"] == 120
    drawn = fit(name, rows.rows(some_rows(rows.known_labels, 120, 0)), **short)
    new = draw_rows(1, n=40)
    assert torch.equal(some.probabilities(new), drawn.probabilities(new))
    with pytest.raises(ParameterError, match="max_rows must be a whole number"):
        fit(name, rows, max_rows=0, **short)


def test_a_million_rows_are_bounded_by_default_for_every_method_with_features() -> None:
    bounded = {name for name, method in REGISTRY.items() if "max_rows" in settings_of(method)}
    assert bounded == {name for name, method in REGISTRY.items() if method.needs_features}
    assert settings_of(REGISTRY["vq"])["max_rows"] == MOST_FEATURE_ROWS == 20_000
