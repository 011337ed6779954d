"""The verdict says what the intervals show and no more, also when that is unwelcome."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from segcal.report.cautions import cautions
from segcal.report.comparisons import Compared, Comparisons
from segcal.report.label_changes import label_sentences
from segcal.report.results import Results
from segcal.report.roles import assign_roles
from segcal.report.verdict import Verdict, overview, verdicts
from tests.report.results_data import BAD, GOOD, PLAIN, Fake, make_results


def judge(results: Results) -> list[Verdict]:
    return verdicts(results.summary, assign_roles(results.summary), Comparisons(results.summary, results.records))


def states(verdict: Verdict) -> dict[str, str]:
    return {e.column: e.state for e in verdict.evidence}


def test_a_clear_gain_is_called_an_improvement_by_every_measure(tmp_path: Path) -> None:
    (verdict,) = judge(make_results(tmp_path, [PLAIN, Fake("ts(z)", shift=GOOD, spread=0.02, gap=0.02)]))
    assert verdict.outcome == "better"
    assert set(states(verdict).values()) == {"better"}
    assert verdict.headline == (
        "On these cases the probabilities of ts(z) are better than those of the uncalibrated ensemble "
        "in NLL, Brier, ECE, BA-ECE and ACE."
    )
    assert "stays the same in every voxel" in verdict.sentences[0]


def test_a_clear_loss_is_called_worse(tmp_path: Path) -> None:
    (verdict,) = judge(make_results(tmp_path, [PLAIN, Fake("ts(z)", shift=BAD, spread=0.02, gap=0.2)]))
    assert verdict.outcome == "worse"
    assert verdict.headline.startswith("On these cases the probabilities of ts(z) are worse than those of")
    assert "better" not in verdict.headline


def test_differences_drowned_in_noise_are_not_shown(tmp_path: Path) -> None:
    noisy = Fake("ts(z)", shift={"nll": -0.001}, spread=0.5, gap=PLAIN.gap)
    (verdict,) = judge(make_results(tmp_path, [PLAIN, noisy]))
    assert verdict.outcome == "open"
    assert verdict.headline == "On these cases no difference between ts(z) and the uncalibrated ensemble is shown."


def test_gain_and_loss_together_are_mixed_and_both_are_named(tmp_path: Path) -> None:
    half = Fake("ts(z)", shift={**GOOD, "ba_ece": 0.01}, spread=0.02, gap=0.02)
    (verdict,) = judge(make_results(tmp_path, [PLAIN, half]))
    assert verdict.outcome == "mixed"
    assert (
        "better than those of the uncalibrated ensemble in NLL, Brier, ECE and ACE, but worse in BA-ECE."
        in verdict.headline
    )


def test_better_probabilities_with_a_worse_segmentation_are_mixed(tmp_path: Path) -> None:
    flipping = Fake("ms(z)", "ms", shift={**GOOD, "dsc": -0.02}, spread=0.02, gap=0.02, flip=0.01)
    (verdict,) = judge(make_results(tmp_path, [PLAIN, flipping]))
    assert verdict.outcome == "mixed"
    assert "the segmentation itself becomes worse (Dice score)" in verdict.headline
    assert states(verdict)["dsc"] == "worse"
    assert verdict.sentences[0].startswith("1 % of voxels change their label (0.5 % right before and wrong now")
    assert "This hurts: the mean Dice score changes by −2.0" in verdict.sentences[0]


def test_a_worse_segmentation_alone_is_worse(tmp_path: Path) -> None:
    flipping = Fake("ms(z)", "ms", shift={"dsc": -0.02}, spread=0.02, gap=PLAIN.gap, flip=0.01)
    (verdict,) = judge(make_results(tmp_path, [PLAIN, flipping]))
    assert verdict.outcome == "worse"
    assert verdict.headline.startswith("On these cases the segmentation itself becomes worse")


@pytest.mark.parametrize(("n_cases", "outcome"), [(1, "few"), (5, "few"), (6, "better")])
def test_five_subjects_show_nothing_even_when_all_agree(tmp_path: Path, n_cases: int, outcome: str) -> None:
    pair = [PLAIN, Fake("ts(z)", shift=GOOD, spread=0.001, gap=0.02)]
    (verdict,) = judge(make_results(tmp_path, pair, n_cases=n_cases))
    assert verdict.outcome == outcome
    if outcome == "few":
        assert verdict.headline.startswith("Too few cases to tell whether ts(z) helps")
        assert set(states(verdict).values()) == {"few"}


def test_few_cases_do_not_say_whether_flips_hurt(tmp_path: Path) -> None:
    flipping = Fake("ms(z)", "ms", shift={"dsc": -0.1}, flip=0.01)
    (verdict,) = judge(make_results(tmp_path, [PLAIN, flipping], n_cases=3))
    assert "too few cases to tell whether that hurts" in verdict.sentences[0]


def test_flips_without_a_shown_change_of_dice_are_neither_harm_nor_benefit(tmp_path: Path) -> None:
    flipping = Fake("ms(z)", "ms", shift=GOOD, spread=1.0, flip=0.0004)
    (verdict,) = judge(make_results(tmp_path, [PLAIN, flipping]))
    assert "0.04 % of voxels change their label" in verdict.sentences[0]
    assert "Neither harm nor benefit is shown" in verdict.sentences[0]


def test_a_broken_promise_to_keep_labels_is_called_a_defect(tmp_path: Path) -> None:
    (verdict,) = judge(make_results(tmp_path, [PLAIN, Fake("ts(z)", "ts", flip=0.001)]))
    assert "This is a defect" in verdict.sentences[0]


def test_flips_against_the_deployed_files_are_told_also_for_methods_that_keep_labels() -> None:
    shares = {"flip": 0.0, "flip_deployed": 0.002, "flip_deployed_harmful": 0.002, "flip_deployed_beneficial": 0.0}
    entry = {"preserves": "order", "metrics": {name: {"mean": value} for name, value in shares.items()}}
    kept, moved = label_sentences(entry, None)
    assert "stays the same in every voxel" in kept
    assert moved.startswith(
        "Against the deployed segmentation files 0.2 % of voxels have another label (0.2 % right before"
    )


def test_an_interval_that_only_one_scheme_keeps_off_zero_is_not_shown() -> None:
    both = Compared("a", "b", "nll", -1.0, -2.0, -0.5, -2.0, -0.5, 1.0, 0.0, 20, 20)
    assert both.state == "better"
    assert replace(both, column="dsc").state == "worse"
    assert replace(both, subject_high=0.1).state == "disputed"
    assert replace(both, high=0.1, subject_high=0.1).state == "open"
    assert replace(both, difference=0.0, low=0.0, high=0.0, subject_low=0.0, subject_high=0.0).state == "same"
    assert replace(both, low=None).state == "unknown"
    assert replace(both, n_subjects=5).state == "few"


def test_ace_below_its_noise_limit_ranks_nobody(tmp_path: Path) -> None:
    better = Fake("ts(z)", shift=GOOD, spread=0.02, gap=0.03)
    results = make_results(tmp_path, [PLAIN, better])
    (before,) = judge(results)
    assert states(before)["ace"] == "better"
    assert "so some miscalibration remains" in " ".join(before.sentences)
    for pipeline in results.summary["pipelines"]:
        pipeline["metrics"]["ace"]["noise_limit"] = 1.0
    (after,) = judge(results)
    assert states(after)["ace"] == "open"
    assert "so none can be told from noise" in " ".join(after.sentences)


def test_the_free_alternative_is_named(tmp_path: Path) -> None:
    """Averaging probabilities needs no calibration data; a calibrator that does not beat it is told so."""
    free = Fake("uncalibrated(p)", "identity", pooling="probabilities", shift={"nll": -0.02}, gap=0.01)
    (verdict,) = judge(make_results(tmp_path, [PLAIN, free, Fake("ts(z)", shift=GOOD, spread=0.02, gap=0.02)]))
    told = next(sentence for sentence in verdict.sentences if sentence.startswith("Against uncalibrated(p)"))
    assert "NLL worse (+0.0100" in told
    assert "ECE better (−0.005" in told


def test_bands_that_get_worse_are_named(tmp_path: Path) -> None:
    near_better_far_worse = Fake("ts(z)", shift=GOOD, spread=0.02, gap=0.02, band_gaps=(0.01, 0.08, 0.2, 0.08))
    (verdict,) = judge(make_results(tmp_path, [PLAIN, near_better_far_worse]))
    told = next(sentence for sentence in verdict.sentences if sentence.startswith("Not better everywhere"))
    assert "7 to 15 voxels (0.0" in told
    assert "0 to 3" not in told


def test_groups_that_get_worse_or_are_too_small_are_named(tmp_path: Path) -> None:
    pair = [PLAIN, Fake("ts(z)", shift=GOOD, spread=0.02, gap=0.02)]
    (small,) = judge(make_results(tmp_path / "small", pair, n_cases=15, groups=["a", "a", "a", "a", "b"]))
    assert "Too few subjects to tell within group b." in small.sentences
    (large,) = judge(make_results(tmp_path / "large", pair, n_cases=40, groups=["a", "b"]))
    assert not any("group" in sentence for sentence in large.sentences)
    (bad,) = judge(
        make_results(tmp_path / "bad", [PLAIN, Fake("ts(z)", shift=BAD, gap=0.2)], n_cases=40, groups=["a", "b"])
    )
    assert "In group a, NLL, Brier, ECE, BA-ECE and ACE get worse." in bad.sentences


def test_differences_made_from_the_cases_equal_those_of_the_summary(tmp_path: Path) -> None:
    results = make_results(tmp_path, [PLAIN, Fake("ts(z)", shift=GOOD, spread=0.1, gap=0.02)], n_repeats=2)
    known = Comparisons(results.summary, results.records)
    made = Comparisons({**results.summary, "differences": []}, results.records)
    for column in ("nll", "dsc", "ace"):
        assert made.find("ts(z)", "uncalibrated(z)", column) == known.find("ts(z)", "uncalibrated(z)", column)


def test_the_overview_counts_outcomes_and_warns_of_picking_the_best(tmp_path: Path) -> None:
    good, bad = Fake("ts(z)", shift=GOOD, gap=0.02), Fake("ets(z)", "ets", shift=BAD, gap=0.2)
    first, second = overview(judge(make_results(tmp_path, [PLAIN, good, bad])))
    assert first == (
        "2 calibrated pipelines against their uncalibrated input: improvement shown for ts(z); worse for ets(z)."
    )
    assert second.startswith("The lowest mean NLL is that of ts(z) (0.0")
    assert "optimistic" in second


def test_nothing_calibrated_gives_no_verdict(tmp_path: Path) -> None:
    found = judge(make_results(tmp_path, [PLAIN]))
    assert found == []
    assert overview(found) == ["No calibrator was evaluated. The page describes the ensemble as it is."]


def test_warnings_cover_what_puts_numbers_in_doubt(tmp_path: Path) -> None:
    starved = Fake("ts(z)", warnings=("fitted on 4 cases only",))
    context = {
        "failed": {"case_x": "member_1/case_x.npz: truncated"},
        "warnings": ["manifest was predicted without mirroring", "ts(z): fitted on 4 cases only"],
        "outside_share": {"case_000": 0.5, "case_001": 0.3},
        "n_floored": 12,
    }
    results = make_results(tmp_path, [PLAIN, starved], n_cases=8, context=context, undefined=["case_002"])
    found = cautions(results)
    texts = [(c.severity, c.heading, c.text) for c in found]
    assert [severity for severity, _, _ in texts] == sorted((s for s, _, _ in texts), reverse=True)
    assert ("serious", "case left out", "case_x: member_1/case_x.npz: truncated") in texts
    assert ("serious", "run", "manifest was predicted without mirroring") in texts
    assert sum("fitted on 4 cases only" in text for _, _, text in texts) == 1
    headings = {heading for _, heading, _ in texts}
    assert {"few test cases", "fill voxels", "zeros in the files", "undefined", "one fit"} <= headings
    assert "40.0 % of their voxels" in next(c.text for c in found if c.heading == "fill voxels")


def test_classes_that_are_hardly_there_are_named(tmp_path: Path) -> None:
    results = make_results(tmp_path, [PLAIN], n_cases=20)
    assert not [c for c in cautions(results) if c.heading == "starved class"]
    for k, row in enumerate(results.records.rows):
        row.tables["confusion"][0, 1] = 0.0  # liver is labelled nowhere
        row.tables["confusion"][0, 2] = 100.0 if k < 3 else 0.0
    texts = [c.text for c in cautions(results) if c.heading == "starved class"]
    assert texts == [
        "`liver` has no labelled voxel in these cases; nothing is known about it.",
        "`tumour` is labelled in 3 of 20 cases (900 voxels).",
    ]


def test_repeats_that_share_subjects_are_mentioned(tmp_path: Path) -> None:
    results = make_results(tmp_path, [PLAIN, Fake("ts(z)", shift=GOOD)], n_repeats=3)
    headings = [c.heading for c in cautions(results)]
    assert "overlapping test sets" in headings
    assert "one fit" not in headings
