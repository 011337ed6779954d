"""The plain-language verdict: what the paired differences show, what they do not show, and what happens to labels.

A side is called shown only when both 95 % intervals (two-level and by subject) lie wholly on it. Nothing else here
turns a number into a word, so the verdict cannot claim more than the table below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from segcal.counted import count
from segcal.report.comparisons import MIN_SUBJECTS, Compared, Comparisons, State
from segcal.report.label_changes import label_sentences
from segcal.report.pooled import PooledTables, where_worse
from segcal.report.roles import PipelineEntry, Roles, base_of
from segcal.report.wording import MEASURES, difference_interval, listing, number, signed

JUDGED = ("nll", "brier", "ece", "ba_ece", "ace")
"""What the quality of probabilities is judged by; the Dice score judges the segmentation."""

Outcome = Literal["better", "mixed", "open", "worse", "few"]
OUTCOME_WORDS: dict[Outcome, str] = {
    "better": "improvement shown",
    "mixed": "mixed",
    "open": "nothing shown",
    "worse": "worse",
    "few": "too few cases",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """One measure before and after, with what may be concluded."""

    column: str
    before: float | None
    after: float | None
    compared: Compared
    state: State


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of one pipeline against the uncalibrated one with the same input."""

    name: str
    base: str
    outcome: Outcome
    headline: str
    evidence: tuple[Evidence, ...]
    sentences: tuple[str, ...]

    @property
    def label(self) -> str:
        return OUTCOME_WORDS[self.outcome]


def verdicts(summary: Mapping[str, Any], roles: Roles, comparisons: Comparisons) -> list[Verdict]:
    """One verdict for each calibrated pipeline that has an uncalibrated counterpart."""
    entries = {p["name"]: p for p in roles.main}
    paired = [(p, base) for p in roles.calibrated if (base := base_of(p, roles.main)) is not None]
    return [_verdict(summary, pipeline, entries[base], roles, comparisons) for pipeline, base in paired]


def _verdict(
    summary: Mapping[str, Any], pipeline: PipelineEntry, base: PipelineEntry, roles: Roles, comparisons: Comparisons
) -> Verdict:
    name = pipeline["name"]
    evidence = [e for column in JUDGED if (e := _evidence(pipeline, base, column, comparisons)) is not None]
    dice = _evidence(pipeline, base, "dsc", comparisons)
    outcome = outcome_of(evidence, dice)
    sentences = [
        *label_sentences(pipeline, None if dice is None else dice.compared),
        *_left_over(pipeline, comparisons.summary),
        *_against_other_pooling(name, base["name"], roles, comparisons),
        *where_worse(PooledTables.of(comparisons.records, summary), summary, name, base["name"]),
        *_groups(summary, name, base["name"], comparisons),
    ]
    shown = tuple(evidence) if dice is None or dice.state in ("same", "unknown") else (*evidence, dice)
    return Verdict(name, base["name"], outcome, _headline(name, outcome, evidence, dice), shown, tuple(sentences))


def _evidence(pipeline: PipelineEntry, base: PipelineEntry, column: str, known: Comparisons) -> Evidence | None:
    compared = known.find(pipeline["name"], base["name"], column)
    if compared is None:
        return None
    before, after = (p["metrics"].get(column, {}).get("mean") for p in (base, pipeline))
    # Two pipelines whose ACE cannot be told from 0 must not be ranked by it (docs/intervals.md).
    noise = column == "ace" and _is_noise(base) and _is_noise(pipeline)
    state: State = "open" if noise and compared.state in ("better", "worse") else compared.state
    return Evidence(column, before, after, compared, state)


def _is_noise(pipeline: PipelineEntry) -> bool:
    ace = pipeline["metrics"].get("ace", {})
    mean, limit = ace.get("mean"), ace.get("noise_limit")
    return mean is not None and limit is not None and mean <= limit


def outcome_of(evidence: Sequence[Evidence], decision: Evidence | None) -> Outcome:
    """What all measures of the probabilities, and the one of the decision, show together."""
    if any(e.state == "few" for e in evidence):
        return "few"
    better = any(e.state == "better" for e in evidence)
    worse = any(e.state == "worse" for e in evidence) or (decision is not None and decision.state == "worse")
    if better and worse:
        return "mixed"
    return "better" if better else "worse" if worse else "open"


def _headline(name: str, outcome: Outcome, evidence: Sequence[Evidence], dice: Evidence | None) -> str:
    if outcome == "few":
        return (
            f"Too few cases to tell whether {name} helps: with fewer than {MIN_SUBJECTS} subjects even a difference "
            "that goes the same way in all of them can be chance. The numbers below only describe these cases."
        )
    if outcome == "open":
        return f"On these cases no difference between {name} and the uncalibrated ensemble is shown."
    better, worse = _named(evidence, "better"), _named(evidence, "worse")
    rest = [*_named(evidence, "open"), *_named(evidence, "disputed")]
    parts = [f"better than those of the uncalibrated ensemble in {listing(better)}"] if better else []
    if worse:
        parts.append(f"worse{'' if better else ' than those of the uncalibrated ensemble'} in {listing(worse)}")
    sentence = f"On these cases the probabilities of {name} are {', but '.join(parts)}" if parts else ""
    if parts and rest:
        sentence += f"; no difference is shown in {listing(rest)}"
    if dice is not None and dice.state == "worse":
        lost = "the segmentation itself becomes worse (Dice score)"
        sentence = f"{sentence}, and {lost}" if parts else f"On these cases {lost}; the probabilities do not improve"
    return f"{sentence}."


def _named(evidence: Sequence[Evidence], state: State) -> list[str]:
    return [MEASURES[e.column].short for e in evidence if e.state == state]


def _left_over(pipeline: PipelineEntry, summary: Mapping[str, Any]) -> list[str]:
    """Whether what is left of the calibration error can be told from none."""
    ace = pipeline["metrics"].get("ace", {})
    mean, limit = ace.get("mean"), ace.get("noise_limit")
    if mean is None or limit is None:
        return []
    level = float(summary["settings"]["bootstrap"]["confidence_level"])
    would = f"a perfectly calibrated model would stay below {limit:.4f} in {100 * level:g} % of test sets like this one"
    if not _is_noise(pipeline):
        return [
            f"What is left: its average calibration error (ACE) is {mean:.4f}; {would}, so some miscalibration remains."
        ]
    return [
        f"What is left: its average calibration error (ACE) is {mean:.4f}; {would}, so none can be told from noise."
    ]


def _against_other_pooling(name: str, base: str, roles: Roles, comparisons: Comparisons) -> list[str]:
    """Against the other uncalibrated ensemble: averaging probabilities is free and often calibrates by itself."""
    found = []
    for other in roles.main:
        if other.get("calibrated") or other["name"] == base or other.get("n_members") is not None:
            continue
        parts = [
            _phrase(compared)
            for column in ("nll", "ece")
            if (compared := comparisons.find(name, other["name"], column)) is not None
        ]
        if parts:
            found.append(f"Against {other['name']}, which needs no calibration data: {'; '.join(parts)}.")
    return found


def _groups(summary: Mapping[str, Any], name: str, base: str, comparisons: Comparisons) -> list[str]:
    """Groups in which a measure gets worse, in which no improvement is shown, or too small to tell."""
    worse, silent, few = list[str](), list[str](), list[str]()
    for group in summary.get("groups") or {}:
        compared = [c for column in JUDGED if (c := comparisons.in_group(group, name, base, column)) is not None]
        if any(c.state == "few" for c in compared):
            few.append(group)
            continue
        bad = [MEASURES[c.column].short for c in compared if c.state == "worse"]
        if bad:
            worse.append(f"In group {group}, {listing(bad)} {'gets' if len(bad) == 1 else 'get'} worse.")
        elif not any(c.state == "better" for c in compared):
            silent.append(group)
    if silent:
        worse.append(f"No improvement is shown within {'group' if len(silent) == 1 else 'groups'} {listing(silent)}.")
    if few:
        worse.append(f"Too few subjects to tell within {'group' if len(few) == 1 else 'groups'} {listing(few)}.")
    return worse


def _phrase(compared: Compared) -> str:
    """`NLL lower by 0.0022 (interval −0.0036 to −0.0011), shown`."""
    short = MEASURES[compared.column].short
    interval = difference_interval(compared.low, compared.high, compared.column)
    if compared.difference is None:
        return f"{short} is not defined"
    words = {"better": "better", "worse": "worse", "same": "equal", "few": "too few cases to tell"}
    word = words.get(compared.state, "no difference shown")
    return f"{short} {word} ({signed(compared.difference, compared.column)}, interval {interval})"


def overview(found: Sequence[Verdict]) -> list[str]:
    """The sentences above the verdicts: how many were judged, and that the best of many is optimistic."""
    if not found:
        return ["No calibrator was evaluated. The page describes the ensemble as it is."]
    if len(found) == 1:
        return []
    parts = []
    for outcome, words in OUTCOME_WORDS.items():
        names = [v.name for v in found if v.outcome == outcome]
        if names:
            parts.append(f"{words} for {listing(names)}")
    sentences = [f"{count(len(found), 'calibrated pipeline')} against their uncalibrated input: {'; '.join(parts)}."]
    best = min(found, key=_nll_after)
    if _nll_after(best) < float("inf"):
        sentences.append(
            f"The lowest mean NLL is that of {best.name} ({number(_nll_after(best), 'nll')}). Choosing a row by this "
            "table and quoting its number is optimistic; choose on validation cases, or confirm on new ones."
        )
    return sentences


def _nll_after(verdict: Verdict) -> float:
    values = [e.after for e in verdict.evidence if e.column == "nll" and e.after is not None]
    return values[0] if values else float("inf")
