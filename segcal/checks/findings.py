"""One thing a check found, and how bad it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["fatal", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("fatal", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of a check.

    Attributes:
        code: Stable short name, for scripts.
        severity: `fatal`: a run would stop or its result be wrong; `warning`: look at it; `note`: good to know.
        case: Case id; None when it concerns the whole manifest.
        file: Path as the manifest writes it; None when it concerns no single file.
        message: What was seen, what was expected, the way out.
    """

    code: str
    severity: Severity
    case: str | None
    file: str | None
    message: str

    def line(self) -> str:
        """The finding in one line, for people."""
        place = " ".join(part for part in (self.case, f"({self.file})" if self.file else None) if part)
        return f"{self.severity:<7} {place + ': ' if place else ''}{' '.join(self.message.split())} [{self.code}]"

    def as_dict(self) -> dict[str, str | None]:
        """The finding for machines."""
        return asdict(self)


_EACH_FILE = frozenset(("missing_file", "unreadable_file", "unpoolable"))
"""Findings that say something else of every file: which one it is must not be lost."""


def one_per_case(findings: Iterable[Finding]) -> list[Finding]:
    """Members of a case usually share a fault: keep the first finding of each code and say how many more have it."""
    alike: dict[tuple[str, str | None], list[Finding]] = {}
    for finding in findings:
        own = finding.file if finding.code in _EACH_FILE else None
        alike.setdefault((finding.code, own), []).append(finding)
    merged = []
    for first, *others in alike.values():
        files = {other.file for other in others} - {first.file}
        also = (
            "" if not files else f" The same in {len(files)} more member{'s' if len(files) > 1 else ''} of this case."
        )
        merged.append(replace(first, message=first.message + also))
    return merged
