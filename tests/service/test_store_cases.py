"""Cases, calibrators and tokens in the store, over SQLite and PostgreSQL."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from sqlalchemy import select, update

from segcal.service.errors import UnknownError
from segcal.service.model import NewCase
from segcal.service.store import Store
from segcal.service.store.tables import cases, tokens
from tests.service.stores import SHA, calibrator, new_case, submit


def finish(store: Store, found: Sequence[NewCase], batch: str = "night") -> str:
    """A job that is done with these cases."""
    job_id = submit(store, batch=batch)
    claim = store.jobs.claim("worker", 60)
    assert claim is not None
    assert store.jobs.finish(claim, message="", result={}, cases=found)
    return job_id


def names(store: Store, **options: object) -> list[str]:
    """Case ids of a page."""
    return [record.case.case_id for record in store.cases.page(**options)]  # type: ignore[arg-type]


def test_a_case_comes_back_as_it_was_found(store: Store) -> None:
    found = NewCase(
        "é / case",
        "ok",
        calibrator=SHA,
        n_flags=1,
        flags=(("low_dsc", "expected DSC 0.4 is low"),),
        expected_dsc=0.1 + 0.2,
        boundary_confidence=0.9,
        member_dice=0.8,
        disagreement=0.01,
        z_free_energy=-4.0,
        z_free_energy_std=1.5,
        z_confidence=None,
        numbers={"volume": 12.5, "undefined": {"z": "too few"}},
        reliability={"before": [[1.0, 2.0]], "after": [[1.0, 2.0]]},
        view="view/0",
        files=("out/a.npz", "out/a.nii.gz"),
    )
    job_id = finish(store, [found])

    (record,) = store.cases.page()

    assert record.case == found
    assert (record.job_id, record.batch) == (job_id, "night")
    assert record.day == datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%d")
    assert store.cases.get(record.key) == record
    with pytest.raises(UnknownError):
        store.cases.get(record.key + 1)


def test_numbers_keep_their_order_which_is_that_of_the_classes(store: Store) -> None:
    numbers = {"expected_dsc:whole": 0.9, "expected_dsc:core": 0.8, "undefined": {}}
    finish(store, [new_case("a", numbers=numbers)])
    assert list(store.cases.page()[0].case.numbers) == list(numbers)


@pytest.mark.parametrize("search", ["MÜLLER", "Ärztin", "müller", "ärztin"])
def test_names_with_letters_beyond_z_are_found_as_they_are_written(store: Store, search: str) -> None:
    finish(store, [new_case(name) for name in ("MÜLLER 1", "Ärztin", "müller 2", "ärztin 3", "other")])
    assert {name for name in names(store, search=search) if search in name}
    assert "other" not in names(store, search=search)


def test_the_worst_come_first(store: Store) -> None:
    finish(
        store,
        [
            new_case("fine", expected_dsc=0.95),
            new_case("flagged", n_flags=1, expected_dsc=0.9),
            new_case("flagged and low", n_flags=1, expected_dsc=0.2),
            new_case("two flags", n_flags=2, expected_dsc=0.99),
            new_case("no estimate"),
            NewCase("broken", "failed", error="truncated"),
        ],
    )
    expected = ["broken", "two flags", "flagged and low", "flagged", "no estimate", "fine"]

    assert names(store) == expected
    assert names(store, descending=True) == expected[::-1]
    assert names(store, limit=2, offset=1) == expected[1:3]


@pytest.mark.parametrize("sort", ["expected_dsc", "boundary_confidence", "disagreement"])
def test_numbers_sort_with_the_undefined_ones_last_both_ways(store: Store, sort: str) -> None:
    finish(store, [new_case("high", **{sort: 0.9}), new_case("none"), new_case("low", **{sort: 0.1})])

    assert names(store, sort=sort) == ["low", "high", "none"]
    assert names(store, sort=sort, descending=True) == ["high", "low", "none"]


def test_outlyingness_is_the_largest_score_of_either_sign(store: Store) -> None:
    finish(store, [new_case("a", z_free_energy=-5.0, z_confidence=1.0), new_case("b", z_confidence=3.0), new_case("c")])

    assert names(store, sort="outlyingness", descending=True) == ["a", "b", "c"]


def test_cases_are_found_by_every_filter(store: Store) -> None:
    finish(store, [new_case("liver_1", n_flags=1), NewCase("liver_2", "failed", error="x")], batch="a")
    finish(store, [new_case("Spleen_100%")], batch="b")
    day = store.cases.page()[0].day

    assert names(store, batch="b") == ["Spleen_100%"]
    assert names(store, flagged=True) == ["liver_1"]
    assert sorted(names(store, flagged=False)) == ["Spleen_100%", "liver_2"]
    assert names(store, status="failed") == ["liver_2"]
    assert names(store, search="SPLEEN") == ["Spleen_100%"]
    assert names(store, search="0%") == ["Spleen_100%"]
    assert names(store, search="%") == ["Spleen_100%"]  # a character, not a wildcard
    assert names(store, calibrator=SHA, sort="case", batch="a") == ["liver_1"]
    assert store.cases.count(day=day) == 3
    assert store.cases.count(day="2000-01-01") == 0
    assert names(store, sort="newest")[0] == "Spleen_100%"


def test_the_overview_sums_batches_by_day(store: Store) -> None:
    finish(store, [new_case("a", n_flags=2, expected_dsc=0.5), new_case("b", expected_dsc=0.7)], batch="early")
    with store._database.write() as connection:
        connection.execute(update(cases).values(day="2020-01-01"))
    finish(store, [NewCase("c", "failed", error="x")], batch="late")
    latest = finish(store, [new_case("d")], batch="late")

    late, early = store.cases.days()

    assert (late.batch, late.n_cases, late.n_flagged, late.n_failed) == ("late", 2, 0, 1)
    assert (late.mean_expected_dsc, late.job_id) == (None, latest)
    assert (early.day, early.batch, early.n_cases, early.n_flagged, early.n_failed) == ("2020-01-01", "early", 2, 1, 0)
    assert early.mean_expected_dsc == pytest.approx(0.6)
    assert store.cases.days(limit=1) == [late]


def test_the_trend_is_the_last_cases_that_worked_oldest_first(store: Store) -> None:
    finish(store, [new_case(f"case {n}", expected_dsc=n / 10) for n in range(5)])
    finish(store, [NewCase("broken", "failed", calibrator=SHA), NewCase("other", "ok", calibrator="b" * 64)])

    points = store.cases.trend(calibrator=SHA, limit=3)

    assert [point.case_id for point in points] == ["case 2", "case 3", "case 4"]
    assert [point.expected_dsc for point in points] == [0.2, 0.3, 0.4]
    assert len(store.cases.trend(calibrator=None)) == 6
    assert store.cases.trend(calibrator=None, batch="none") == []


def test_a_calibrator_is_added_once_retired_once_and_knows_where_it_is_used(store: Store) -> None:
    assert store.calibrators.add(calibrator(created=1.0))
    assert not store.calibrators.add(calibrator(created=2.0))
    store.calibrators.add(calibrator("b" * 64, created=3.0))
    finish(store, [new_case("a"), new_case("b")], batch="first")
    finish(store, [new_case("c")], batch="second")

    assert store.calibrators.get(SHA) == calibrator(created=1.0)
    assert [record.sha256[0] for record in store.calibrators.list()] == ["b", "a"]
    assert store.calibrators.n_cases(SHA) == 3
    assert store.calibrators.batches(SHA) == ["second", "first"]
    assert store.calibrators.batches("b" * 64) == []
    retired = store.calibrators.retire(SHA)
    assert retired.retired is not None
    assert store.calibrators.retire(SHA) == retired
    assert [record.sha256[0] for record in store.calibrators.list(with_retired=False)] == ["b"]
    with pytest.raises(UnknownError):
        store.calibrators.retire("c" * 64)


def test_a_token_is_known_by_its_text_and_stored_as_a_hash_only(store: Store) -> None:
    record, text = store.tokens.create("anna", "submit", None)

    assert store.tokens.check(text) == record
    prefix, token_id, secret = text.split("_")
    assert (prefix, token_id, len(bytes.fromhex(secret))) == ("segcal", record.id, 32)
    with store._database.read() as connection:
        (row,) = connection.execute(select(tokens)).all()
    assert row.hash == hashlib.sha256(secret.encode()).hexdigest()
    assert secret not in str(row)
    assert secret not in repr(record)


def test_wrong_expired_and_revoked_tokens_are_nobody(store: Store) -> None:
    record, text = store.tokens.create("anna", "read", None)
    other, other_text = store.tokens.create("bert", "admin", None)
    _, expired = store.tokens.create("carl", "read", time.time() - 1)

    assert store.tokens.check(text[:-1] + ("0" if text[-1] != "0" else "1")) is None
    assert store.tokens.check(text.replace(record.id, other.id)) is None
    assert store.tokens.check(expired) is None
    for nonsense in ("", "segcal__", "x" * 10_000, text + "\n", text.upper(), "segcal_\udcff_\0", f" {text}"):
        assert store.tokens.check(nonsense) is None
    revoked = store.tokens.revoke(record.id)
    assert revoked.revoked is not None
    assert store.tokens.check(text) is None
    assert store.tokens.check(other_text) == other
    assert store.tokens.revoke(record.id) == revoked
    assert {each.name for each in store.tokens.list()} == {"anna", "bert", "carl"}
    with pytest.raises(UnknownError, match="segcal token list"):
        store.tokens.revoke("000000000000")


def test_a_token_is_compared_in_constant_time_also_when_it_is_unknown(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hmac

    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def counting(left: str, right: str) -> bool:
        compared.append((len(left), len(right)))
        return real(left, right)

    monkeypatch.setattr("segcal.service.store.token_table.hmac.compare_digest", counting)
    _, text = store.tokens.create("anna", "read", None)
    for given in (text, "segcal_" + "0" * 12 + "_" + "0" * 64, "nonsense"):
        store.tokens.check(given)

    assert compared == [(64, 64)] * 3
