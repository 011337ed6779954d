"""Open everything a manifest names and say what is wrong before hours of fitting depend on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from segcal.checks.case import CaseCheck
from segcal.checks.findings import SEVERITIES, Finding
from segcal.checks.labels import unseen_findings
from segcal.checks.orientation import Orientation
from segcal.checks.turned import shared_orientation
from segcal.counted import count
from segcal.device import resolve_device
from segcal.manifest import Manifest
from segcal.types import Progress

__all__ = ["CheckReport", "Finding", "check_manifest"]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All findings and how much was looked at."""

    findings: tuple[Finding, ...]
    n_cases: int
    n_files: int

    @property
    def has_fatal(self) -> bool:
        """Whether anything would stop a run or make its result wrong."""
        return any(finding.severity == "fatal" for finding in self.findings)

    def counts(self) -> dict[str, int]:
        """Number of findings of each severity."""
        counted = Counter(finding.severity for finding in self.findings)
        return {severity: counted[severity] for severity in SEVERITIES}

    def summary(self) -> str:
        """One line for people."""
        numbers = ", ".join(f"{n} {severity}" for severity, n in self.counts().items())
        verdict = "not usable as it is" if self.has_fatal else "usable"
        return f"{count(self.n_cases, 'case')}, {count(self.n_files, 'file')} opened: {numbers}; {verdict}"


def check_manifest(
    manifest: Manifest,
    *,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    on_finding: Callable[[Finding], None] | None = None,
) -> CheckReport:
    """Check every file of a manifest, one case in memory at a time.

    Args:
        device: Where members are pooled; everything else is counted on the host.
        progress: Called as progress("check", done, total) after every case.
        on_finding: Called with each finding as soon as it is known.
    """
    findings: list[Finding] = []
    on_device = resolve_device(device)

    def report(found: Finding) -> None:
        findings.append(found)
        if on_finding is not None:
            on_finding(found)

    for finding in _repeated_labels(manifest):
        report(finding)
    seen: set[int] = set()
    orientations: list[Orientation] = []
    n_files = 0
    for done, case in enumerate(manifest.cases, start=1):
        checked = CaseCheck(manifest, case, on_device).run()
        seen |= checked.label_values
        orientations += [] if checked.orientation is None else [checked.orientation]
        n_files += checked.n_files
        for finding in checked.findings:
            report(finding)
        if progress is not None:
            progress("check", done, len(manifest.cases))
    for finding in [*shared_orientation(manifest, orientations), *_label_coverage(manifest, seen)]:
        report(finding)
    return CheckReport(tuple(findings), len(manifest.cases), n_files)


def _repeated_labels(manifest: Manifest) -> Iterator[Finding]:
    """One label for two cases may be meant; one member file for two cases never is, and no such manifest loads."""
    first_use: dict[str, str] = {}
    for case in manifest.cases:
        if case.label is not None:
            other = first_use.setdefault(case.label, case.id)
            if other != case.id:
                text = f"also named by {other}; two cases with one label are one case, or a slip. Correct the path."
                yield Finding("repeated_file", "warning", case.id, case.label, text)


def _label_coverage(manifest: Manifest, seen: set[int]) -> Iterator[Finding]:
    if not manifest.labelled_cases:
        text = "no case has a label; the manifest serves `segcal apply` and `segcal qa`, not fitting or evaluation."
        yield Finding("no_labels", "note", None, None, text)
    elif seen:
        yield from unseen_findings(manifest, seen)
