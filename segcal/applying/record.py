"""run.json: what a run of `segcal apply` read, wrote and was asked for, so it can be resumed and audited.

The file is replaced as a whole after every case (less often when it is very long), and only after the case's own files
are finished: whatever interrupts a run, every case that run.json calls done is complete on disk.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from segcal.applying.possible_files import possible_files
from segcal.applying.stored import MapFormat, StorageType
from segcal.counted import count
from segcal.errors import FileFormatError, UsageError
from segcal.io.atomic import remove_unfinished, write_text_atomic
from segcal.manifest_models import CaseId
from segcal.types import AppliedPooling, Kind

RECORD_NAME = "run.json"
SUBFOLDERS = ("probabilities", "confidence", "entropy", "segmentation")
"""Where a run may write below its folder (`segcal.applying.files`)."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ApplySettings(_Entry):
    """Everything besides the calibrator and the input files that decides what a case's files hold."""

    format: MapFormat
    dtype: StorageType
    confidence: bool
    entropy: bool
    kind: Kind
    pooling: AppliedPooling
    axes: str
    label_values: tuple[int, ...]


class InputFile(_Entry):
    """A file that was read, as the manifest names it.

    The fingerprint of a member says its size and checksums; that of a label or image, of which only the geometry is
    used, says its grid.
    """

    file: str
    fingerprint: str


class OutputFile(_Entry):
    """A file that was written, relative to the run's folder."""

    file: str
    bytes: int


class Recipe(_Entry):
    """What a case's files were made from; a case is done again when any of it changes."""

    calibrator_sha256: str
    settings: ApplySettings
    inputs: tuple[InputFile, ...]


class CaseEntry(_Entry):
    """One case of a run: finished with its files, or failed with the message and what an earlier run left of it."""

    status: Literal["done", "failed"]
    recipe: Recipe | None = None
    outputs: tuple[OutputFile, ...] = ()
    n_floored: int = 0
    n_differing: int = 0
    warnings: tuple[str, ...] = ()
    error: str | None = None
    seconds: dict[str, float] = Field(default_factory=dict)

    def differs_from(self, recipe: Recipe) -> str:
        """What keeps the files of a finished case from being taken over, in words."""
        if self.recipe is None or self.recipe == recipe:
            return "its files"
        parts = ["calibrator"] if self.recipe.calibrator_sha256 != recipe.calibrator_sha256 else []
        was, wanted = self.recipe.settings.model_dump(), recipe.settings.model_dump()
        parts += [name for name in wanted if was[name] != wanted[name]]
        parts += ["input files"] if self.recipe.inputs != recipe.inputs else []
        return ", ".join(parts)

    def stands_for(self, recipe: Recipe, out: Path) -> bool:
        """Whether the files are still there, whole, and made from exactly this."""
        return (
            self.status == "done"
            and self.recipe == recipe
            and all(_size(out / output.file) == output.bytes for output in self.outputs)
        )


class RunRecord(BaseModel):
    """The content of run.json."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    command: Literal["apply"] = "apply"
    complete: bool = False
    calibrator_sha256: str
    method: str
    manifest_name: str
    manifest_sha256: str
    settings: ApplySettings
    versions: dict[str, str]
    warnings: tuple[str, ...] = ()
    cases: dict[CaseId, CaseEntry] = Field(default_factory=dict)

    @field_validator("cases")
    @classmethod
    def _own_files(cls, cases: dict[str, CaseEntry]) -> dict[str, CaseEntry]:
        # Files of an earlier run are removed by these names: one that leads elsewhere must not be believed.
        for case_id, entry in cases.items():
            foreign = {output.file for output in entry.outputs}.difference(possible_files(case_id))
            if foreign:
                raise ValueError(f"{case_id} lists {min(foreign)!r}, which `segcal apply` never writes for that case")
        return cases

    def save(self, out: Path) -> None:
        """Replace run.json in `out`; same content, same bytes."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True)
        write_text_atomic(out / RECORD_NAME, text + "\n")


def open_record(
    out: Path, fresh: RunRecord, *, resume: bool, chosen: Collection[str], inputs: set[Path], targets: Iterable[str]
) -> RunRecord:
    """Start the record of a run, or take up the one in the folder, and write it.

    Args:
        out: The run's folder; made when it is not there.
        fresh: The record of a run that has not done anything yet.
        resume: Whether a record in the folder may be continued.
        chosen: The cases of the run.
        inputs: Files the run reads; none of them may be overwritten.
        targets: Names the run may write, relative to `out`.

    Raises:
        UsageError: The folder belongs to another run, to something else or to the inputs.
    """
    before = load_record(out)
    n_written = 0 if before is None else sum(bool(entry.outputs) for entry in before.cases.values())
    if n_written and not resume:
        raise UsageError(
            f"{out}: already holds a run ({RECORD_NAME}, {count(n_written, 'case')}). "
            "Add --resume to continue it, or choose another folder with --out."
        )
    if before is not None:
        _refuse_mixture(out, before, fresh, chosen)
    for target in targets:
        _refuse_taken(out, target, inputs, ours=before is not None)
    if before is not None:
        remove_unfinished(out, SUBFOLDERS)
        fresh = fresh.model_copy(update={"cases": dict(before.cases)})
    fresh.save(out)
    return fresh


def load_record(out: Path) -> RunRecord | None:
    """The record in a run's folder, None where there is none."""
    path = out / RECORD_NAME
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise UsageError(f"{out}: is a file, and a run needs a folder; choose another --out.") from error
    except OSError as error:  # a folder, a loop of links, somebody else's
        raise UsageError(f"{path}: cannot be read ({error.strerror}); choose another --out.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file as a whole"
        raise FileFormatError(
            f"{path}: not the record of a `segcal apply` run ({where}: {first['msg'].removeprefix('Value error, ')}). "
            "Choose another folder with --out, or remove the file if it belongs to nothing."
        ) from error


def _refuse_mixture(out: Path, before: RunRecord, fresh: RunRecord, chosen: Collection[str]) -> None:
    """A folder says of all its maps by which calibrator they were made."""
    left = [
        case_id
        for case_id, entry in before.cases.items()
        if case_id not in chosen
        and entry.recipe is not None
        and entry.recipe.calibrator_sha256 != fresh.calibrator_sha256
    ]
    if left:
        raise UsageError(
            f"{out}: {count(len(left), 'map')} of another calibrator ({before.method}; {', '.join(left[:3])}) would "
            "stay beside those of this one. Choose another --out, or apply to all its cases."
        )


def _refuse_taken(out: Path, target: str, inputs: set[Path], *, ours: bool) -> None:
    path = out / target
    if path.resolve() in inputs:
        raise UsageError(f"{path}: is one of the input files and would be overwritten; choose another --out.")
    if not ours and path.exists():
        raise UsageError(
            f"{path}: already exists, and the folder has no {RECORD_NAME} that says segcal wrote it. "
            "Choose an empty folder with --out."
        )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
