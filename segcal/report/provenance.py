"""What was run on what, what the measures mean, and how to get the same numbers again."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from segcal.calibrators import CALIBRATORS
from segcal.counted import count
from segcal.report.results import Results
from segcal.report.roles import PipelineEntry
from segcal.report.wording import listing

Fact = tuple[str, str]


@dataclass(frozen=True, slots=True)
class PipelineWords:
    """A line of the table that explains the pipelines."""

    name: str
    calibrated: bool
    input: str
    words: str
    keeps: str
    invariant: str


def run_facts(results: Results) -> list[Fact]:
    """Data, sizes, classes, versions; what the summary does not say is left out."""
    summary = results.summary
    manifest = summary.get("manifest") or {}
    classes = summary.get("classes") or []
    groups = results.records.groups
    candidates: list[tuple[str, str | None]] = [
        ("kind of run", {"evaluate": "segcal evaluate", "study": "segcal study"}.get(summary.get("run", ""))),
        ("manifest", manifest.get("name")),
        ("manifest SHA-256", manifest.get("sha256")),
        ("member files hold", manifest.get("kind")),
        ("members per case", str(summary["n_members"]) if summary.get("n_members") else None),
        ("labelled cases", _cases(results)),
        ("split", _split(summary)),
        ("groups", listing(groups) if groups else None),
        ("repeats", str(summary["n_repeats"]) if int(summary["n_repeats"]) > 1 else None),
        ("regions" if summary.get("regions") else "classes", ", ".join(classes) if classes else None),
        ("versions", ", ".join(f"{name} {text}" for name, text in sorted((summary.get("versions") or {}).items()))),
    ]
    return [(term, value) for term, value in candidates if value]


def pipeline_words(pipelines: Sequence[PipelineEntry]) -> list[PipelineWords]:
    """How each pipeline pools, what its method does, and what it promises."""
    found = []
    for p in pipelines:
        keeps = {"order": "yes, and the ranking of classes", "argmax": "yes"}.get(str(p.get("preserves")), "no")
        alone = "member" if p.get("n_members") == 1 else "ensemble"
        words = method_words(str(p.get("method"))) if p.get("calibrated") else f"none: the {alone} as it is"
        invariant = "yes" if p.get("translation_invariant") else "no"
        found.append(PipelineWords(p["name"], bool(p.get("calibrated")), _input(p), words, keeps, invariant))
    return found


def method_words(method: str) -> str:
    """The first line of the method's own description; its key alone when it is not known here."""
    known = CALIBRATORS.get(method)
    text = (inspect.getdoc(known) or "").splitlines()[0] if known is not None else ""
    return f"{method}: {text}" if text else method


def commands(results: Results) -> list[str]:
    """Commands that make the results and this page again; words in capitals are for the reader to fill in."""
    summary = results.summary
    how, metrics = summary["settings"]["bootstrap"], summary["settings"]["metrics"]
    if summary.get("run") == "study":
        return ["segcal study MANIFEST --config study.yaml --out RESULTS", "segcal report RESULTS"]
    n_calibrated = sum(1 for p in summary["pipelines"] if p.get("calibrated"))
    parts = ["segcal evaluate MANIFEST", *["--calibrator CALIBRATOR"] * n_calibrated]
    if summary.get("split") is not None:
        parts.append(f"--split {summary['split']} --subset {summary.get('subset', 'test')}")
    parts += ["--include-background"] if metrics.get("include_background") else []
    parts += [f"--replicates {how['n_replicates']} --seed {how['seed']}", "--out RESULTS"]
    return [" ".join(parts), "segcal report RESULTS"]


def reproduce_facts(results: Results) -> list[Fact]:
    """Seeds and the hashes that tell whether a rerun is the same."""
    summary = results.summary
    how = summary["settings"]["bootstrap"]
    facts = [("seed of the intervals", str(how["seed"]))]
    for pipeline in summary["pipelines"]:
        if pipeline.get("calibrator_sha256"):
            hashes = ", ".join(pipeline["calibrator_sha256"])
            facts.append((f"calibrator {pipeline['name']}", f"SHA-256 {hashes}"))
    facts += [(name, f"SHA-256 {digest} (what this page shows)") for name, digest in results.digests.items()]
    facts.append(("same inputs", "The same manifest, calibrators, seed and versions give the same bytes in all files."))
    return facts


def settings_text(summary: Mapping[str, Any]) -> str:
    """The study's settings as the YAML that `--config` reads; empty for an evaluation."""
    settings = summary.get("study")
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True) if isinstance(settings, Mapping) else ""


def _cases(results: Results) -> str:
    n_cases, n_subjects = int(results.summary["n_cases"]), results.n_subjects
    return f"{n_cases}" if n_subjects == n_cases else f"{n_cases} of {count(n_subjects, 'subject')}"


def _split(summary: Mapping[str, Any]) -> str | None:
    return None if summary.get("split") is None else f"{summary['split']}, {summary.get('subset', 'test')} cases"


def _input(pipeline: PipelineEntry) -> str:
    members = pipeline.get("n_members")
    if members == 1:
        return "the first member alone"
    which = "all members" if members is None else f"the first {members} members"
    what = {"logits": "mean of the logits", "probabilities": "mean of the probabilities"}
    return f"{what.get(str(pipeline.get('pooling')), str(pipeline.get('pooling')))}, {which}"
