"""The short page of a folder that `segcal apply` wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from segcal.applying.record import RECORD_NAME, CaseEntry, RunRecord, load_record
from segcal.counted import count
from segcal.errors import MissingFileError
from segcal.report.cautions import Caution
from segcal.report.provenance import Fact, method_words
from segcal.report.render import render
from segcal.report.wording import DASH, about_case
from segcal.types import AppliedPooling


@dataclass(frozen=True, slots=True)
class AppliedLine:
    """One case of the run."""

    case: str
    done: bool
    n_inputs: int
    n_outputs: int
    size: str
    seconds: str


def applied_page(folder: Path) -> str:
    """What was applied to what, which cases are done, what to look at next."""
    record = load_record(folder)
    if record is None:
        raise MissingFileError(f"{folder / RECORD_NAME}: not there; `segcal apply` writes it into its --out")
    done = [case for case, entry in record.cases.items() if entry.status == "done"]
    return render(
        "apply.html.j2",
        name=record.manifest_name,
        lead=f"{count(len(done), 'case')} with {record.method} · segcal {record.versions.get('segcal', DASH)}",
        sentences=_sentences(record, len(done)),
        cautions=_cautions(record),
        facts=_facts(record),
        lines=[_line(case, entry) for case, entry in sorted(record.cases.items())],
        commands=[f"segcal qa {quote(str(folder))} --out qa"],
    )


_POOLED: dict[AppliedPooling, str] = {
    "logits": "mean of the logits",
    "probabilities": "mean of the probabilities",
    "members-probabilities": "members calibrated one by one, then mean of their probabilities",
}


def _sentences(record: RunRecord, n_done: int) -> list[str]:
    failed = len(record.cases) - n_done
    sentences = [f"{count(n_done, 'case was', 'cases were')} written completely."]
    if failed:
        sentences.append(
            f"{count(failed, 'case')} failed and {'has' if failed == 1 else 'have'} no result; see the warnings."
        )
    if not record.complete:
        sentences.append("The run was not finished: further cases may be missing. `segcal apply … --resume` goes on.")
    return sentences


def _cautions(record: RunRecord) -> list[Caution]:
    found = [] if record.complete else [Caution("serious", "not finished", "The run stopped before its last case.")]
    for case, entry in sorted(record.cases.items()):
        if entry.status == "failed":
            found.append(Caution("serious", "case failed", about_case(case, entry.error or "no reason was recorded")))
    found += [Caution("serious", "run", text) for text in record.warnings]
    for case, entry in sorted(record.cases.items()):
        found += [Caution("note", "case", f"{case}: {text}") for text in entry.warnings]
    floored = sum(entry.n_floored for entry in record.cases.values())
    if floored:
        text = (
            f"{count(floored, 'probability', 'probabilities')} stored as 0 were raised to the smallest of their type."
        )
        found.append(Caution("note", "zeros in the files", text))
    differing = sum(entry.n_differing for entry in record.cases.values())
    if differing:
        text = f"In {count(differing, 'voxel')} the mean of the calibrated members names another class."
        found.append(Caution("note", "map and segmentation", text))
    return found


def _facts(record: RunRecord) -> list[Fact]:
    settings = record.settings
    extra = [name for name, wanted in (("confidence", settings.confidence), ("entropy", settings.entropy)) if wanted]
    return [
        ("method", method_words(record.method)),
        ("calibrator SHA-256", record.calibrator_sha256),
        ("manifest", record.manifest_name),
        ("manifest SHA-256", record.manifest_sha256),
        ("member files hold", settings.kind),
        ("pooled by", _POOLED[settings.pooling]),
        ("array axes", settings.axes),
        ("label values", ", ".join(str(value) for value in settings.label_values)),
        ("written as", f"{settings.format}, {settings.dtype}"),
        ("further maps", ", ".join(extra) or "none"),
        ("versions", ", ".join(f"{name} {text}" for name, text in sorted(record.versions.items()))),
    ]


def _line(case: str, entry: CaseEntry) -> AppliedLine:
    total = sum(output.bytes for output in entry.outputs)
    seconds = sum(entry.seconds.values())
    return AppliedLine(
        case=case,
        done=entry.status == "done",
        n_inputs=len(entry.recipe.inputs) if entry.recipe else 0,
        n_outputs=len(entry.outputs),
        size=f"{total / 1e6:.1f} MB" if total else DASH,
        seconds=f"{seconds:.1f}" if seconds else DASH,
    )
