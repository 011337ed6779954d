"""What the paired differences of rows show, in words that claim no more than the table below them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from segcal.classification.intervals import COMPARED
from segcal.report.comparisons import MIN_SUBJECTS
from segcal.report.roles import Roles
from segcal.report.verdict import Evidence, Outcome, Verdict, outcome_of
from segcal.report.wording import MEASURES, difference_interval, listing, number, signed

if TYPE_CHECKING:
    from segcal.classification.page import RowResults

JUDGED = tuple(column for column in COMPARED if column != "accuracy")
"""What the quality of probabilities is judged by; accuracy judges the decision."""
_ERRORS = ("ece", "adaptive_ece", "classwise_ece")


def is_noise(pipeline: Mapping[str, Any], column: str) -> bool:
    """Whether a calibration error lies below what noise alone makes of a perfectly calibrated pipeline."""
    values = pipeline["metrics"][column]
    return (
        values["mean"] is not None and values.get("noise_limit") is not None and values["mean"] <= values["noise_limit"]
    )


def row_verdicts(results: RowResults, roles: Roles) -> list[Verdict]:
    """One verdict for each calibrated pipeline against the uncalibrated scores."""
    base = results.summary["pipelines"][0]
    return [_verdict(results, pipeline, base) for pipeline in roles.calibrated]


def _verdict(results: RowResults, pipeline: Mapping[str, Any], base: Mapping[str, Any]) -> Verdict:
    name = pipeline["name"]
    evidence = [e for column in JUDGED if (e := _evidence(results, pipeline, base, column)) is not None]
    accuracy = _evidence(results, pipeline, base, "accuracy")
    outcome = outcome_of(evidence, accuracy)
    shown = [*evidence] if accuracy is None or accuracy.state in ("same", "unknown") else [*evidence, accuracy]
    headline = _headline(name, outcome, evidence, accuracy)
    return Verdict(name, base["name"], outcome, headline, tuple(shown), tuple(_sentences(pipeline, accuracy)))


def _evidence(
    results: RowResults, pipeline: Mapping[str, Any], base: Mapping[str, Any], column: str
) -> Evidence | None:
    compared = results.find(pipeline["name"], base["name"], column)
    if compared is None:
        return None
    before, after = (p["metrics"][column]["mean"] for p in (base, pipeline))
    return Evidence(column, before, after, compared, compared.state)


def _headline(name: str, outcome: Outcome, evidence: Sequence[Evidence], accuracy: Evidence | None) -> str:
    if outcome == "few":
        return f"Too few rows to tell whether {name} helps: fewer than {MIN_SUBJECTS} independent ones show nothing."
    if outcome == "open":
        return f"On these rows no difference between {name} and the uncalibrated scores is shown."
    better, worse = ([MEASURES[e.column].words for e in evidence if e.state == state] for state in ("better", "worse"))
    parts = [f"better than the uncalibrated ones in {listing(better)}"] if better else []
    parts += [f"worse in {listing(worse)}"] if worse else []
    text = f"The probabilities of {name} are {', and '.join(parts)}." if parts else ""
    if accuracy is not None and accuracy.state == "worse":
        text += " Its accuracy is lower."
    return text.strip()


def _sentences(pipeline: Mapping[str, Any], accuracy: Evidence | None) -> list[str]:
    found = []
    if pipeline["preserves"]:
        found.append("It keeps the prediction of every row.")
    else:
        changed = number(pipeline["metrics"]["flip"]["mean"], "flip")
        text = f"It changes the prediction of {changed} of rows"
        if accuracy is not None and accuracy.compared.difference is not None:
            interval = difference_interval(accuracy.compared.low, accuracy.compared.high, "accuracy")
            text += f"; accuracy changes by {signed(accuracy.compared.difference, 'accuracy')} ({interval}) points"
        found.append(text + ".")
    noisy = [MEASURES[column].short for column in _ERRORS if is_noise(pipeline, column)]
    if noisy:
        found.append(f"What is left of {listing(noisy)} cannot be told from noise on so many rows.")
    return found
