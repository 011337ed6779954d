"""The agreement of members: pairwise definitions against explicit pairs, volumes against each member alone."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import expit, softmax

from segcal.cases import Want, load_poolings
from segcal.io.members import Member
from segcal.metrics.base import Undefined
from segcal.qa.members import MemberTally
from segcal.types import Box, Kind
from tests.apply_data import CPU, random_logits, write_manifest

SHAPE = (3, 4, 5, 6)
BOX: Box = ((1, 4), (0, 3), (2, 6))


def tally_of(
    members: list[NDArray[Any]], *, regions: bool = False, kind: Kind = "logits", crop: Box | None = None
) -> MemberTally:
    tally = MemberTally(regions=regions)
    for position, values in enumerate(members):
        tally.add(position, Member(values, kind, crop))
    return tally


def correlated(n: int, seed: int = 0) -> list[NDArray[np.float32]]:
    base = random_logits(seed, SHAPE, 2.0)
    return [base + random_logits(seed + 1 + m, SHAPE, 1.0) for m in range(n)]


@pytest.mark.parametrize("n_members", [2, 5])
def test_dice_and_disagreement_are_those_of_all_pairs(n_members: int) -> None:
    members = correlated(n_members)
    tally = tally_of(members)
    decisions = [values.argmax(0) for values in members]
    pairs = list(combinations(decisions, 2))
    for c, found in enumerate(tally.dice(), start=1):
        both = sum(2 * int(((a == c) & (b == c)).sum()) for a, b in pairs)
        each = sum(int((a == c).sum() + (b == c).sum()) for a, b in pairs)
        assert found == pytest.approx(both / each, abs=1e-12)
    zone = np.random.default_rng(1).random(SHAPE[1:]) < 0.3
    expected = np.mean([(a != b)[zone].mean() for a, b in pairs])
    assert tally.disagreement(zone) == pytest.approx(expected, abs=1e-12)


def test_regions_are_decisions_of_their_own() -> None:
    members = correlated(3)
    tally = tally_of(members, regions=True)
    pairs = list(combinations([values > 0 for values in members], 2))
    zone = np.ones(SHAPE[1:], dtype=bool)
    assert tally.disagreement(zone) == pytest.approx(np.mean([(a != b).mean() for a, b in pairs]), abs=1e-12)
    assert len(tally.dice()) == 3
    volumes = [expit(values.astype(np.float64)).sum((1, 2, 3)) for values in members]
    for spread, reference in zip(tally.volume_spreads(), np.transpose(volumes), strict=True):
        assert spread.by_member == pytest.approx(reference, rel=1e-5)


def test_spread_is_that_of_each_members_own_expected_volume() -> None:
    members = correlated(4)
    reference = np.array([softmax(values.astype(np.float64), 0).sum((1, 2, 3))[1:] for values in members])
    for spread, volumes in zip(tally_of(members).volume_spreads(), reference.T, strict=True):
        assert spread.by_member == pytest.approx(volumes, rel=1e-5)
        assert (spread.low, spread.high) == pytest.approx((volumes.min(), volumes.max()), rel=1e-5)
        assert spread.std == pytest.approx(volumes.std(ddof=1), rel=1e-4)
        assert spread.variation == pytest.approx(volumes.std(ddof=1) / volumes.mean(), rel=1e-4)


def test_probability_files_give_the_volumes_of_their_values() -> None:
    probs = [softmax(values, 0) for values in correlated(2)]
    spreads = tally_of(probs, kind="probabilities").volume_spreads()
    assert spreads[0].by_member == pytest.approx([p[1].sum(dtype=np.float64) for p in probs], rel=1e-6)


def test_what_a_file_holds_outside_its_crop_does_not_count() -> None:
    members = correlated(2)
    clean = tally_of(members, crop=BOX)
    for values in members:
        outside = np.ones(SHAPE[1:], dtype=bool)
        outside[*(slice(*ends) for ends in BOX)] = False
        values[2, outside] = 1e4
    dirty = tally_of(members, crop=BOX)
    assert dirty.volume_spreads() == clean.volume_spreads()
    assert dirty.dice() == clean.dice()
    assert dirty.volume_spreads()[1].high < 40


def test_a_single_member_agrees_with_nobody() -> None:
    tally = tally_of(correlated(1))
    assert all(isinstance(score, Undefined) for score in tally.dice())
    assert isinstance(tally.disagreement(np.ones(SHAPE[1:], dtype=bool)), Undefined)
    assert isinstance(tally.volume_spreads()[0].std, Undefined)


def test_equal_members_agree_exactly() -> None:
    members = [random_logits(0, SHAPE)] * 3
    tally = tally_of(members)
    assert tally.dice() == (1.0, 1.0)
    assert tally.disagreement(np.ones(SHAPE[1:], dtype=bool)) == 0.0
    assert tally.volume_spreads()[0].std == 0.0


def test_a_class_no_member_sees_and_a_missing_boundary_are_undefined() -> None:
    values = np.zeros(SHAPE, dtype=np.float32)
    values[0] = 1
    tally = tally_of([values, values])
    assert all(isinstance(score, Undefined) for score in tally.dice())
    assert isinstance(tally.disagreement(None), Undefined)


def test_large_volumes_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tally_of(correlated(2))
    monkeypatch.setattr("segcal.qa.members._CHUNK_VALUES", 1)
    parts = tally_of(correlated(2))
    assert parts.dice() == whole.dice()
    for a, b in zip(parts.volume_spreads(), whole.volume_spreads(), strict=True):
        assert a.by_member == pytest.approx(b.by_member, rel=1e-6)


def test_members_are_handed_over_in_order_while_they_are_pooled(tmp_path: Path) -> None:
    members = correlated(3)
    manifest = write_manifest(tmp_path, {"a": members})
    seen: list[tuple[int, NDArray[Any]]] = []
    wanted = [Want("logits")]
    load_poolings(
        manifest,
        manifest.case("a"),
        wanted,
        device=CPU,
        with_labels=False,
        on_member=lambda position, member: seen.append((position, member.values.copy())),
    )
    assert [position for position, _ in seen] == [0, 1, 2]
    for (_, values), given in zip(seen, members, strict=True):
        np.testing.assert_array_equal(values, given)
