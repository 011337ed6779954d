"""What the demo's numbers say, in sentences. Every sentence is built from the numbers, so none can outlive them."""

from __future__ import annotations

from collections.abc import Mapping

from segcal.demo.ensemble import SITES
from segcal.demo.scores import BEFORE, DemoScores
from segcal.fitted import FittedCalibrator

CANNOT_SHOW = (
    "No network was trained. Shapes, errors and offsets are smooth random fields made up for this demo, and the "
    "over-confidence is a factor written into the program. How much calibration gains on your data is a question for "
    "your data.",
    "The ranking of the methods follows from how the errors were made up and does not carry over.",
    "Labels are drawn from probabilities that are known here. Real labels carry the habits of the people who drew "
    "them, and a calibrator learns these habits too.",
    "The second site differs in the offsets of its logits only. Other scanners, protocols and patients change far "
    "more, and no post-hoc calibrator is safe against that.",
    "There are few, small test cases and no confidence intervals, so the last digits of the table mean little.",
)
"""What a reader must not take away from the phantom."""


def findings(scores: DemoScores, fitted: Mapping[str, FittedCalibrator], applied: str) -> list[str]:
    """The sentences of the page, most important first."""
    sentences = [_before(scores), _applied(scores, applied, keeps=bool(fitted[applied].info.preserves))]
    free = [name for name, calibrator in fitted.items() if not calibrator.info.preserves]
    if free:
        sentences.append(_free_methods(scores, free))
    if {"ms", "ms_c"} <= set(fitted) and set(SITES) <= set(scores.groups):
        sentences.append(_offsets(scores))
    return sentences


def _before(scores: DemoScores) -> str:
    group = next(iter(scores.groups))
    table = scores.reliability(BEFORE, group)
    gap = 100 * float((table.confidence - table.hits).sum()) / table.total
    word, side = ("over-confident", "above") if gap > 0 else ("under-confident", "below")
    return (
        f"The ensemble is {word}: over all voxels of {group}, its mean confidence lies {abs(gap):.2f} percentage "
        f"points {side} the share of voxels that are right. Most voxels are easy; where the ensemble hesitates, the "
        "gap is far larger, as the reliability diagrams show."
    )


def _applied(scores: DemoScores, applied: str, *, keeps: bool) -> str:
    group = next(iter(scores.groups))
    nll, ece = ([scores.mean(name, group, column) for name in (BEFORE, applied)] for column in ("nll", "ece"))
    kept = (
        f"not one of the {scores.n_voxels:,} voxels has another class than before"
        if scores.n_moved_on_disk == 0
        else f"{scores.n_moved_on_disk:,} of {scores.n_voxels:,} voxels have another class than before"
    )
    who = f"{applied}, which keeps every decision by construction," if keeps else applied
    return (
        f"{who} takes the negative log-likelihood on {group} from {nll[0]:.4f} to {nll[1]:.4f} and the calibration "
        f"error from {ece[0]:.2%} to {ece[1]:.2%}. In the files it wrote for the test cases, segmentations and "
        f"probabilities alike, {kept}."
    )


def _free_methods(scores: DemoScores, free: list[str]) -> str:
    group = next(iter(scores.groups))
    before = scores.mean(BEFORE, group, "dsc")
    flips = [scores.mean(name, group, "flip") for name in free]
    dice = [scores.mean(name, group, "dsc") for name in free]
    return (
        f"{_listed(free)} may move decisions: on {group} they move {min(flips):.2%} to {max(flips):.2%} of all voxels, "
        f"and their mean Dice is {min(dice):.2%} to {max(dice):.2%}, against {before:.2%} before. Whether a "
        "segmentation may change after it was validated is not for a calibrator to decide; the other methods leave it "
        "as it is."
    )


def _offsets(scores: DemoScores) -> str:
    home, away = SITES
    ms = {site: scores.mean("ms", site, "nll") for site in SITES}
    twin = {site: scores.mean("ms_c", site, "nll") for site in SITES}
    sentences = [
        "ms reads the offset that all logits of a voxel share. Softmax ignores it: no probability depends on it. "
        f"At {home}, where all calibration cases come from, it happens to follow the organ.",
        f"On {home} the negative log-likelihood of ms is {ms[home]:.4f}, that of its translation-invariant twin ms_c "
        f"{twin[home]:.4f}; on {away}, where the offset follows another pattern, {ms[away]:.4f} against "
        f"{twin[away]:.4f}.",
    ]
    if ms[home] < twin[home] and ms[away] > twin[away]:
        sentences.append("What helps at home does harm elsewhere; translation-invariant methods cannot fall for it.")
    return " ".join(sentences)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
