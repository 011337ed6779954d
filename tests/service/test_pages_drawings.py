"""Drawings of the pages: every mark stands where its number says, beside the limit that flags it."""

from __future__ import annotations

import numpy as np
import pytest

from segcal.qa.settings import QaSettings
from segcal.service.store import TrendPoint
from segcal.service.web.reliability import MARGIN, SIZE, pooled_errors, reliability_diagram
from segcal.service.web.trend import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, trend_charts
from segcal.service.web.wording import duration, file_size, percent, setting, signed

SETTINGS = QaSettings()


def point(key: int, day: str = "2026-03-01", **values: float | None) -> TrendPoint:
    numbers: dict[str, float | None] = dict.fromkeys(
        ("expected_dsc", "boundary_confidence", "z_free_energy", "z_free_energy_std", "z_confidence")
    )
    return TrendPoint(key, f"case_{key}", 0.0, day, int(values.pop("n_flags", 0) or 0), **(numbers | values))


def chart(title: str, *points: TrendPoint, settings: QaSettings = SETTINGS) -> Chart:
    return next(each for each in trend_charts(points, settings) if each.title == title)


def value_at(drawn: Chart, y: float) -> float:
    """What a height stands for, by the drawing's own ticks."""
    ticks = [(tick.y, float(tick.words.replace("\N{MINUS SIGN}", "-").removesuffix(" %"))) for tick in drawn.ticks]
    (first, low), (last, high) = ticks[0], ticks[-1]
    return low + (y - first) / (last - first) * (high - low)


def test_marks_stand_at_their_values_in_the_order_the_cases_came() -> None:
    values = [0.95, 0.7, 0.85, 0.9]
    drawn = chart("expected DSC", *(point(k, expected_dsc=value) for k, value in enumerate(values)))
    assert [value_at(drawn, dot.y) for dot in drawn.dots] == pytest.approx([100 * v for v in values], abs=0.2)
    assert [dot.key for dot in drawn.dots] == [0, 1, 2, 3]
    across = [dot.x for dot in drawn.dots]
    assert across == sorted(across)
    assert LEFT < across[0] < across[-1] < WIDTH - RIGHT
    assert all(TOP <= dot.y <= HEIGHT - BOTTOM for dot in drawn.dots)


def test_the_limit_stands_at_its_value_and_what_lies_beyond_it_is_marked() -> None:
    drawn = chart("expected DSC", point(1, expected_dsc=0.79), point(2, expected_dsc=0.8), point(3, expected_dsc=0.9))
    (limit,) = drawn.limits
    assert value_at(drawn, limit.y) == pytest.approx(80, abs=0.2)
    assert limit.words == "lowest expected DSC 80 %"
    assert [dot.how for dot in drawn.dots] == ["out", "in", "in"]  # as `segcal qa`: below, not at
    assert "1 of the last 3 cases beyond the limit" in drawn.summary


def test_scores_have_a_limit_on_both_sides_and_far_ones_stand_at_the_edge() -> None:
    scores = [0.0, 3.5, -3.6, 100.0, -100.0]
    drawn = chart("mean free energy (z)", *(point(k, z_free_energy=z) for k, z in enumerate(scores)))
    upper, lower = drawn.limits
    assert [value_at(drawn, line.y) for line in (upper, lower)] == pytest.approx([3.5, -3.5], abs=0.2)
    assert [dot.how for dot in drawn.dots] == ["in", "in", "out", "above", "below"]
    assert (drawn.dots[3].y, drawn.dots[4].y) == (TOP, HEIGHT - BOTTOM)
    assert "case_3, 2026-03-01: +100.0" in drawn.dots[3].title


def test_every_day_has_its_median() -> None:
    days = [("2026-03-01", (0.8, 0.9, 0.85)), ("2026-03-02", (0.95, 0.97))]
    points = [point(k, day, expected_dsc=value) for day, values in days for k, value in enumerate(values)]
    drawn = chart("expected DSC", *points)
    assert [value_at(drawn, day.median_y or 0) for day in drawn.days] == pytest.approx([85, 96], abs=0.2)
    assert [day.title for day in drawn.days] == [
        "2026-03-01: median 85.0 % over 3 cases",
        "2026-03-02: median 96.0 % over 2 cases",
    ]
    assert drawn.days[0].right == drawn.days[1].left
    assert "Median on 2026-03-02: 96.0 %." in drawn.summary


def test_the_share_of_flagged_cases_is_drawn_by_day() -> None:
    points = [point(1, "2026-03-01", n_flags=2), point(2, "2026-03-01"), point(3, "2026-03-02", n_flags=1)]
    drawn = chart("share of cases flagged", *points)
    assert [value_at(drawn, day.median_y or 0) for day in drawn.days] == pytest.approx([50, 100], abs=0.2)
    assert drawn.summary == "On 2026-03-02: 1 of 1 case flagged."


def test_what_no_case_has_is_not_drawn_and_a_limit_switched_off_is_none() -> None:
    titles = [each.title for each in trend_charts([point(1, expected_dsc=0.9)], SETTINGS)]
    assert titles == ["expected DSC", "share of cases flagged"]
    assert trend_charts([], SETTINGS) == []
    free = QaSettings(min_expected_dsc=None, max_outlyingness=None)
    assert chart("expected DSC", point(1, expected_dsc=0.1), settings=free).limits == ()
    assert chart("mean free energy (z)", point(1, z_free_energy=50.0), settings=free).dots[0].how == "in"


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], [0.0], [0.999999] * 3, [0.5] * 500])
def test_any_values_can_be_drawn(values: list[float]) -> None:
    drawn = chart("expected DSC", *(point(k, expected_dsc=value) for k, value in enumerate(values)))
    assert len(drawn.dots) == len(values)
    assert 2 <= len(drawn.ticks) <= 12
    assert all(np.isfinite([dot.x, dot.y]).all() for dot in drawn.dots)


def table(counts: dict[int, int], *, confidence: float, hits: float) -> list[list[float]]:
    """15 bins whose voxels share a mean confidence and an accuracy."""
    made = np.zeros((3, 15))
    for k, n in counts.items():
        made[:, k] = n, n * confidence, n * hits
    return made.tolist()


def test_points_of_the_reliability_diagram_stand_at_confidence_and_accuracy() -> None:
    drawn = reliability_diagram({"before": table({12: 100, 3: 40}, confidence=0.85, hits=0.55)})
    assert drawn is not None
    (curve,) = drawn.curves
    ((x, y),) = curve.points  # the bin of 40 voxels is left out
    left, right = drawn.ticks[0], drawn.ticks[-1]
    start = float(left[2].removesuffix(" %")) / 100

    def share(place: float) -> float:
        return start + (place - left[0]) / (right[0] - left[0]) * (1 - start)

    assert share(x) == pytest.approx(0.85, abs=0.003)
    assert share(SIZE - y) == pytest.approx(0.55, abs=0.003)
    assert MARGIN <= x <= SIZE - MARGIN
    assert curve.words == "before (ECE 30.00 %)"
    assert "30.00 percent" in drawn.alt


def test_the_axes_of_the_reliability_diagram_say_where_their_lines_are() -> None:
    drawn = reliability_diagram({"before": table({5: 100, 12: 100}, confidence=0.35, hits=0.35)})
    assert drawn is not None
    assert [words for _, _, words in drawn.ticks] == ["30 %", "47.5 %", "65 %", "82.5 %", "100 %"]


def test_no_tables_no_diagram() -> None:
    assert reliability_diagram(None) is None
    assert reliability_diagram({}) is None
    empty = reliability_diagram({"after": np.zeros((3, 15)).tolist()})
    assert empty is not None
    assert empty.curves[0].words == "after (no voxels)"


def test_errors_of_several_cases_are_pooled_over_voxels() -> None:
    one = {"before": table({12: 300}, confidence=0.85, hits=0.55), "after": table({12: 300}, confidence=0.6, hits=0.55)}
    two = {"before": table({12: 100}, confidence=0.85, hits=0.85), "after": table({12: 100}, confidence=0.8, hits=0.85)}
    found = pooled_errors([one, None, two])
    assert found is not None
    # 300 voxels 30 points too sure, 100 right, in the same bin: 22.5; after: 5 too sure and 5 too unsure.
    assert found == (2, pytest.approx(0.225), pytest.approx(0.025))
    assert pooled_errors([None]) is None


def test_numbers_are_written_for_people() -> None:
    assert percent(None) == percent(float("nan")) == "—"
    assert signed(-1.26) == "−1.3"
    assert [duration(s) for s in (None, 5.4, 200, 7500)] == ["—", "5 s", "3 min 20 s", "2 h 05 min"]
    assert [file_size(n) for n in (999, 1500, 2_340_000)] == ["999 bytes", "1.5 kB", "2.3 MB"]
    assert setting({"a": 1.5, "b": None, "c": [True]}) == "a 1.5, b —, c yes"
