"""The whole flow on the phantom: make it, fit, apply, measure, and put the result on one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from segcal.apply import apply_calibrator
from segcal.calibrators import CALIBRATORS
from segcal.demo.findings import findings
from segcal.demo.page import demo_page
from segcal.demo.phantom import MANIFEST_NAME, make_phantom
from segcal.demo.pictures import DemoPicture, reliability_pictures, slice_pictures
from segcal.demo.scores import DemoScores, score_cases
from segcal.demo.table import Row, markdown_table, table_rows
from segcal.errors import UsageError
from segcal.fitted import FittedCalibrator
from segcal.fitting.run import fit_many
from segcal.io.atomic import atomic_write, write_text_atomic
from segcal.manifest import Manifest
from segcal.settings import PipelineSettings
from segcal.threads import one_thread
from segcal.types import Progress

PHANTOM_FOLDER = "phantom"
CALIBRATOR_FOLDER = "calibrators"
APPLIED_FOLDER = "applied"
PICTURE_FOLDER = "pictures"
PAGE_NAME = "index.html"
TABLE_NAME = "table.md"


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """How large the demo is; the defaults take about a minute.

    Attributes:
        methods: Calibrators to fit, in the order of the table.
        applied: The one whose maps are written to disk.
        trials: Hyper-parameter settings that tuning tries for each method.
        local_trials: The same for methods that look at neighbours, where a trial takes several seconds.
        local_patches: In-plane patches such methods are fitted on.
    """

    methods: tuple[str, ...] = ("ts", "ms", "ms_c", "dc", "cdc", "cms_ap", "cms_op", "lts_ti")
    applied: str = "cms_ap"
    trials: int = 10
    local_trials: int = 3
    local_patches: int = 600
    n_cases: int = 24
    n_other_site: int = 6
    shape: tuple[int, int, int] = (40, 64, 64)

    @property
    def settings(self) -> dict[str, PipelineSettings]:
        """Settings of the fit, by method."""
        return {
            name: PipelineSettings(method=name, trials=self.local_trials, max_patches=self.local_patches)
            if CALIBRATORS[name].spatial
            else PipelineSettings(method=name, trials=self.trials)
            for name in self.methods
        }

    def __post_init__(self) -> None:
        if self.applied not in self.methods:
            raise UsageError(f"the demo applies {self.applied!r}, which is not among its methods {self.methods}")


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo made and found.

    Attributes:
        page: The page to open.
        table: The table in Markdown.
        rows: The table as data.
        findings: What it says, in sentences.
        scores: All numbers by pipeline and case.
    """

    page: Path
    table: Path
    rows: list[Row]
    findings: list[str]
    scores: DemoScores


def run_demo(
    out: Path,
    *,
    seed: int = 0,
    device: torch.device,
    progress: Progress | None = None,
    plan: DemoPlan | None = None,
) -> DemoResult:
    """Runs the whole flow in `out` and returns where the page is. A second run there replaces the first.

    Args:
        out: Gets `phantom/ calibrators/ applied/ pictures/ table.md index.html`.
        seed: Of the phantom and of the fits; the same seed gives the same page.
    """
    plan = plan or DemoPlan()
    # The volumes are small: several threads would spend their time waiting for each other, all the more beside others.
    with one_thread():
        manifest = Manifest.load(
            make_phantom(
                out / PHANTOM_FOLDER,
                seed=seed,
                n_cases=plan.n_cases,
                n_other_site=plan.n_other_site,
                shape=plan.shape,
                progress=progress,
            )
        )
        fitted = fit_many(
            manifest, plan.methods, split=0, settings=plan.settings, seed=seed, device=device, progress=progress
        )
        scores = _apply_and_score(out, manifest, plan, fitted, device, progress)
    return _write(out, manifest, plan, fitted, scores)


def _apply_and_score(
    out: Path,
    manifest: Manifest,
    plan: DemoPlan,
    fitted: dict[str, FittedCalibrator],
    device: torch.device,
    progress: Progress | None,
) -> DemoScores:
    for name, calibrator in fitted.items():
        calibrator.save(out / CALIBRATOR_FOLDER / f"{name}.safetensors")
    test, applied = manifest.split_ids(0).test, out / APPLIED_FOLDER
    # `resume` only so that a second run into the folder is no error: cases made from other bytes are done again.
    apply_calibrator(fitted[plan.applied], manifest, applied, device=device, cases=test, resume=True, progress=progress)
    shown = _shown(manifest, plan)
    return score_cases(manifest, test, fitted, device=device, applied=applied, shown=shown, progress=progress)


def _shown(manifest: Manifest, plan: DemoPlan) -> dict[str, tuple[str, ...]]:
    """Cases for pictures: the first test case of each site; of the last site also with `ms`, which offsets mislead."""
    first: dict[str, str] = {}
    for case_id in manifest.split_ids(0).test:
        first.setdefault(manifest.case(case_id).group or "all", case_id)
    shown: dict[str, tuple[str, ...]] = dict.fromkeys(first.values(), (plan.applied,))
    if "ms" in plan.methods and plan.applied != "ms":
        shown[list(first.values())[-1]] += ("ms",)
    return shown


def _write(
    out: Path, manifest: Manifest, plan: DemoPlan, fitted: dict[str, FittedCalibrator], scores: DemoScores
) -> DemoResult:
    rows, groups = table_rows(scores, fitted), list(scores.groups)
    sentences = findings(scores, fitted, plan.applied)
    reliability = list(reliability_pictures(scores))
    slices = list(slice_pictures(scores, manifest.class_names))
    for picture in (*reliability, *slices):
        _save_picture(out / PICTURE_FOLDER, picture)
    page = demo_page(
        rows=rows,
        groups=groups,
        sentences=sentences,
        reliability=reliability,
        slices=slices,
        commands=_commands(plan),
    )
    write_text_atomic(out / TABLE_NAME, markdown_table(rows, groups))
    write_text_atomic(out / PAGE_NAME, page)
    return DemoResult(out / PAGE_NAME, out / TABLE_NAME, rows, sentences, scores)


def _save_picture(folder: Path, picture: DemoPicture) -> None:
    with atomic_write(folder / picture.name) as temporary:
        temporary.write_bytes(picture.png)


def _commands(plan: DemoPlan) -> list[str]:
    """Command lines that repeat the demo's main steps on its files."""
    manifest, calibrator = f"{PHANTOM_FOLDER}/{MANIFEST_NAME}", f"my_{plan.applied}.safetensors"
    return [
        f"segcal manifest check {manifest}",
        f"segcal fit {manifest} --method {plan.applied} --pooling logits --split 0 --out {calibrator}",
        f"segcal apply {calibrator} {manifest} --out my_maps",
        f"segcal audit {calibrator} {manifest}",
    ]
