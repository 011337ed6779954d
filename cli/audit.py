"""`segcal audit`: does a calibrator keep what it declares?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .apply import CalibratorArgument, CaseOption
from .common import DebugOption, DeviceOption, JsonOption, Output, QuietOption, example

# Imported when the command runs, so that its help does not wait for torch.
if TYPE_CHECKING:
    from segcal.audit import Audit


@example("segcal audit cms_ap.safetensors manifest.yaml")
def audit(
    calibrator: CalibratorArgument,
    manifest: Annotated[
        Path, typer.Argument(metavar="MANIFEST", help="Manifest of the cases to look at; no labels are needed.")
    ],
    case: CaseOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random shifts.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Audit in spite of a mismatch with the manifest.")] = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Check translation invariance and decision preservation of a calibrator on real cases.

    Adds a random shift to the pooled logits of every voxel and reports how far a probability moves, counts decisions
    that differ from the pooled ones, and prints the spatial spread of the free energy. Exit code 1 if a property the
    calibrator declares does not hold.
    """
    from segcal.audit import audit_calibrator
    from segcal.fitted import load_calibrator
    from segcal.manifest import Manifest

    output = Output(json=json, quiet=quiet)
    fitted = load_calibrator(calibrator)
    data = Manifest.load(manifest)
    with output.stages() as progress:
        found = audit_calibrator(
            fitted,
            data,
            seed=seed,
            device=device,
            force=force,
            cases=case,
            progress=progress,
        )
    _report(output, found, seed)
    if not found.holds:
        raise typer.Exit(1)


def _report(output: Output, found: Audit, seed: int) -> None:
    for warning in found.warnings:
        output.warn(warning)
    rows = [
        (case.case_id, case.n_voxels, case.n_flips, *(_cell(v) for v in (case.shift_change, case.free_energy_std)))
        for case in found.cases
    ]
    output.table(("case", "voxels", "flips", "max |Δp|", "std of free energy"), rows)
    spread = found.free_energy_std
    if spread is not None:
        quartiles = ", ".join(f"{value:.3g}" for value in spread[1:])
        output.line(f"spatial std of the pooled free energy: mean {spread.mean:.3g}, quartiles [{quartiles}]")
    for verdict in found.verdicts:
        if verdict.holds is False:
            output.warn(verdict.text)
        else:
            output.line(verdict.text)
    output.result(
        {
            "method": found.method,
            "pooling": found.pooling,
            "seed": seed,
            "holds": found.holds,
            "verdicts": [verdict._asdict() for verdict in found.verdicts],
            "shift_change": found.shift_change,
            "n_flips": found.n_flips,
            "n_voxels": found.n_voxels,
            "free_energy_std": None if spread is None else spread._asdict(),
            "cases": [asdict(case) for case in found.cases],
            "warnings": found.warnings,
        }
    )


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
