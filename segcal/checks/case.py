"""All checks of one case: its files are opened one after the other, and a broken one does not stop the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from segcal.checks.findings import Finding, Severity, one_per_case
from segcal.checks.geometry import image_label_findings, member_findings, partner_findings
from segcal.checks.labels import label_findings
from segcal.checks.orientation import Orientation, fitting_orientations
from segcal.checks.turned import compare_members, compare_orientations
from segcal.checks.value_counts import count_values
from segcal.checks.values import value_findings
from segcal.errors import MissingFileError, SegcalError, WrongKindError
from segcal.io.images import LabelMap, read_grid, read_image, read_labels
from segcal.io.members import Member, member_fingerprint, read_member
from segcal.label_values import label_counts
from segcal.manifest import Manifest, ManifestCase
from segcal.pooling import Pool, Pooled, pooled_decision
from segcal.types import Grid

_Read = TypeVar("_Read")


@dataclass
class CaseCheck:
    """Checks one case; `findings` and `label_values` hold what came out.

    Attributes:
        findings: In the order of the files: members, label, deployed, image, then how they fit together.
        label_values: Values seen in the label.
        orientation: How the prediction fits the label (or the deployed segmentation) best; None if not compared.
        n_files: Files that were opened or tried.
    """

    manifest: Manifest
    case: ManifestCase
    device: torch.device
    findings: list[Finding] = field(default_factory=list)
    label_values: set[int] = field(default_factory=set)
    orientation: Orientation | None = None
    n_files: int = 0
    _first: Member | None = None
    _decided: tuple[str, Tensor] | None = None

    def run(self) -> CaseCheck:
        """Open everything the case names."""
        pooled = self._members()
        label = self._partner("label", self.case.label)
        deployed = self._partner("deployed", self.case.deployed)
        self._image(label.grid if label is not None else None)
        reference, file = (label, self.case.label) if label is not None else (deployed, self.case.deployed)
        if pooled is not None and reference is not None and file is not None:
            turned = compare_orientations(self.manifest, pooled, reference.values, case=self.case.id, file=file)
            self.orientation = None if turned is None else turned.best
            self.findings += [] if turned is None or turned.finding is None else [turned.finding]
        return self

    def _read_member(self, path: Path) -> Member:
        return read_member(path, kind=self.manifest.kind, axes=self.manifest.axes, crop=self.case.crop)

    def _members(self) -> Pooled | None:
        """Check each member and pool it; None when one of them cannot be pooled."""
        pool: Pool | None = Pool("logits", regions=self.manifest.has_regions, device=self.device)
        found: list[Finding] = []
        fingerprints: dict[str, str] = {}
        for file in self.case.members:
            path = self.manifest.resolve(file)
            member = self._read(file, self._read_member)
            if member is None:
                pool = None
                continue
            own = self._member_findings(member, file)
            twin = fingerprints.setdefault(member_fingerprint(path), file)
            if twin != file:
                text = f"holds exactly what {twin} holds; an ensemble of copies says nothing. Name different members."
                own.append(Finding("identical_members", "warning", self.case.id, file, text))
            # Padding in a file of logits is a fatal finding, and still a prediction whose orientation can be told.
            sound = not any(f.severity == "fatal" and f.code != "cropping_fill" for f in own)
            pool = self._pooled(pool, member, file) if sound else None
            own += [] if pool is None else self._turned_member(member, file)
            self._first = self._first or _without_values(member)
            found += own
            del member
        self.findings = one_per_case([*self.findings, *found])
        return None if pool is None else pool.result()

    def _pooled(self, pool: Pool | None, member: Member, file: str) -> Pool | None:
        """The pool with one more member; None when it has to do without one."""
        try:
            if pool is not None:
                pool.add(member)
            return pool
        except SegcalError as error:
            text = str(error).removeprefix(f"{member.path}: ")
            self.findings.append(Finding("unpoolable", "fatal", self.case.id, file, text))
            return None

    def _turned_member(self, member: Member, file: str) -> list[Finding]:
        """How the member lies beside the first one that could be pooled."""
        values = torch.from_numpy(member.values).to(self.device, torch.float32)
        if self.manifest.has_regions:
            decision = values > (0.0 if member.kind == "logits" else 0.5)
        else:
            dtype = torch.uint8 if self.manifest.n_classes <= 256 else torch.int64
            decision = pooled_decision(values, regions=False, dtype=dtype)
        if self._decided is None:
            self._decided = file, decision
        first_file, first = self._decided
        if file == first_file:
            return []
        return compare_members(self.manifest, decision, first, case=self.case.id, file=file, first_file=first_file)

    def _member_findings(self, member: Member, file: str) -> list[Finding]:
        place = {"case": self.case.id, "file": file}
        counts = count_values(member)
        return [
            *member_findings(self.manifest, member, self._first, **place),
            *value_findings(member, counts, regions=self.manifest.has_regions, **place),
        ]

    def _partner(self, role: str, file: str | None) -> LabelMap | None:
        """Check a label map against the members and the classes."""
        found = None if file is None else self._read(file, self._read_partner)
        if found is None or file is None:
            return None
        self._check_grid(role, file, found if isinstance(found, Grid) else found.grid, "fatal")
        if isinstance(found, Grid):
            return None
        counts = label_counts(found.values)
        if role == "label":
            self.label_values.update(counts)
        judged = label_findings(self.manifest, counts, case=self.case.id, file=file)
        self.findings += [f for f in judged if role == "label" or f.severity == "fatal"]
        return found

    def _read_partner(self, path: Path) -> LabelMap | Grid:
        """The label map, or its grid alone where no order of axes fits: another image, which may be far larger."""
        grid = read_grid(path)
        if self._first is not None:
            _, z, y, x = self._first.values.shape
            if not fitting_orientations((z, y, x), grid.shape):
                return grid
        return read_labels(path)

    def _image(self, label: Grid | None) -> None:
        """Check the image, which only serves pictures unless nothing else says where the case lies."""
        severity: Severity = "fatal" if self.case.label is None and self.case.deployed is None else "warning"
        file = self.case.image
        image = None if file is None else self._read(file, lambda path: read_image(path).grid, severity)
        if image is None or file is None:
            return
        self._check_grid("image", file, image, severity)
        if label is not None:
            self.findings += image_label_findings(image, label, case=self.case.id, file=file)

    def _check_grid(self, role: str, file: str, grid: Grid, severity: Severity) -> None:
        if self._first is not None:
            self.findings += partner_findings(
                self._first,
                grid,
                role=role,
                severity=severity,
                case=self.case.id,
                file=file,
                axes=self.manifest.axes,
            )

    def _read(self, file: str, read: Callable[[Path], _Read], severity: Severity = "fatal") -> _Read | None:
        path = self.manifest.resolve(file)
        self.n_files += 1
        try:
            return read(path)
        except MissingFileError:
            slashes = " A manifest's paths are written with / on every system." if "\\" in file else ""
            code = "missing_file"
            text = f"there is no such file under {self.manifest.root}; correct the path.{slashes}"
        except WrongKindError as error:
            code, text = "wrong_kind", str(error).removeprefix(f"{path}: ")
        except SegcalError as error:
            code, text = "unreadable_file", str(error).removeprefix(f"{path}: ")
        except Exception as error:  # whatever a decoder throws at a damaged file, the other files are still checked
            code, text = "unreadable_file", f"cannot be read ({type(error).__name__}: {error})."
        self.findings.append(Finding(code, severity, self.case.id, file, text))
        return None


def _without_values(member: Member) -> Member:
    """The member's geometry, for comparison, without its memory."""
    hollow = np.broadcast_to(np.zeros((), member.values.dtype), member.values.shape)
    return Member(hollow, member.kind, member.crop, member.grid, member.path, member.step)
