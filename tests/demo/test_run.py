"""The whole demo, small and fast, and once in full."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import cli.demo
from cli.main import app
from segcal.calibrators import CALIBRATORS
from segcal.demo.findings import CANNOT_SHOW
from segcal.demo.pictures import slice_pictures
from segcal.demo.run import DemoPlan, DemoResult, run_demo
from segcal.demo.scores import BEFORE
from segcal.demo.table import COLUMNS, table_cells, table_header
from segcal.errors import UsageError
from segcal.fitted import load_calibrator
from segcal.io.images import read_labels
from segcal.manifest import Manifest
from segcal.types import Progress

TINY = DemoPlan(methods=("ts", "ms_c"), applied="ts", trials=1, n_cases=6, n_other_site=2, shape=(12, 24, 24))
CPU = torch.device("cpu")


class Page(HTMLParser):
    """What a browser would load and show of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [given[name] or "" for name in ("src", "href") if name in given]
        if tag == "img":
            self.images.append(given)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoResult]:
    out = tmp_path_factory.mktemp("demo")
    return out, run_demo(out, seed=3, device=CPU, plan=TINY)


def test_demo_leaves_everything_it_promises(tiny: tuple[Path, DemoResult]) -> None:
    out, result = tiny
    assert result.page == out / "index.html"
    assert {path.name for path in out.iterdir()} == {
        "phantom", "calibrators", "applied", "pictures", "table.md", "index.html",
    }  # fmt: skip
    assert load_calibrator(out / "calibrators" / "ts.safetensors").info.method == "ts"
    test = Manifest.load(out / "phantom" / "manifest.yaml").split_ids(0).test
    assert all((out / "applied" / f"{case_id}.npz").is_file() for case_id in test)
    pictures = {path.name for path in (out / "pictures").iterdir()}
    assert {"reliability_site_a.png", "reliability_site_b.png"} < pictures
    assert len(pictures) == 4


def test_page_is_self_contained_and_every_picture_has_words(tiny: tuple[Path, DemoResult]) -> None:
    page = Page(tiny[1].page.read_text(encoding="utf-8"))
    assert len(page.images) == 4
    assert all(len(image["alt"] or "") > 40 for image in page.images)
    assert page.addresses
    assert all(address.startswith("data:") for address in page.addresses)
    assert "url(" not in tiny[1].page.read_text(encoding="utf-8")
    shown = " ".join(page.text.split())
    assert all(sentence in shown for sentence in (*tiny[1].findings, *CANNOT_SHOW))


def test_table_shows_the_measured_numbers(tiny: tuple[Path, DemoResult]) -> None:
    result = tiny[1]
    lines = [line.strip("| ").split(" | ") for line in result.table.read_text().splitlines() if line.startswith("| ")]
    assert lines[0] == table_header(["site_a", "site_b"])
    assert [line[0] for line in lines[1:]] == [BEFORE, "ts", "ms_c"]
    plain = [[cell.strip("*") for cell in line] for line in lines[1:]]
    assert plain == [table_cells(row) for row in result.rows]
    assert plain[1][3] == f"{result.scores.mean('ts', 'site_a', 'nll'):.4f}"
    nll = [result.scores.mean(name, "site_a", "nll") for name in result.scores.pipelines]
    bold = [line[3].startswith("**") for line in lines[1:]]
    assert bold[int(np.argmin(nll))]


def test_numbers_agree_with_a_plain_recomputation(tiny: tuple[Path, DemoResult]) -> None:
    out, result = tiny
    manifest = Manifest.load(out / "phantom" / "manifest.yaml")
    temperature = float(next(iter(load_calibrator(out / "calibrators/ts.safetensors").calibrator.tensors().values())))
    case = manifest.case(manifest.split_ids(0).test[0])
    logits = np.mean([np.load(manifest.resolve(m))["logits"].astype(np.float64) for m in case.members], axis=0)
    labels = read_labels(manifest.resolve(case.label or "")).values.astype(np.int64)
    for name, factor in ((BEFORE, 1.0), ("ts", 1 / temperature)):
        log_probs = torch.log_softmax(torch.from_numpy(factor * logits), dim=0).numpy()
        nll = -np.take_along_axis(log_probs, labels[None], axis=0).mean()
        assert result.scores.results[name][case.id].values["nll"] == pytest.approx(nll, rel=1e-4)
    assert temperature > 1.2


def test_preserving_method_moves_nothing_in_memory_and_on_disk(tiny: tuple[Path, DemoResult]) -> None:
    scores = tiny[1].scores
    assert scores.n_moved_on_disk == 0
    assert scores.n_voxels == 12 * 24 * 24 * sum(len(cases) for cases in scores.groups.values())
    assert scores.mean("ts", "site_a", "flip") == scores.mean("ts", "site_b", "flip") == 0


def test_a_run_over_another_seed_gives_the_page_of_a_fresh_run(tiny: tuple[Path, DemoResult], tmp_path: Path) -> None:
    """Same seed, same bytes; and nothing of the run that was there before is left in what is shown."""
    other = run_demo(tmp_path, seed=4, device=CPU, plan=TINY)
    assert other.page.read_bytes() != tiny[1].page.read_bytes()
    assert run_demo(tmp_path, seed=3, device=CPU, plan=TINY).scores.n_moved_on_disk == 0
    assert (tmp_path / "index.html").read_bytes() == tiny[1].page.read_bytes()
    assert (tmp_path / "table.md").read_bytes() == tiny[1].table.read_bytes()


def test_plan_that_applies_what_it_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="applies 'cms_ap'"):
        DemoPlan(methods=("ts",))


@pytest.fixture
def command(tiny: tuple[Path, DemoResult], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`segcal demo` with options, where the work is replaced by the small run that was already done."""

    def run(*options: str) -> Result:
        def fake(out: Path, *, seed: int, device: torch.device, progress: Progress | None) -> DemoResult:
            assert (out, seed, device) == (Path("somewhere"), 7, CPU)
            assert (progress is None) == bool({"--json", "--quiet"} & set(options))
            return tiny[1]

        monkeypatch.setattr("segcal.demo.run.run_demo", fake)
        return CliRunner().invoke(app, ["demo", "--out", "somewhere", "--seed", "7", "--device", "cpu", *options])

    return run


def test_command_prints_the_table_and_ends_with_the_page(
    command: Callable[..., Result], tiny: tuple[Path, DemoResult]
) -> None:
    done = command()
    assert done.exit_code == 0, done.output
    lines = done.stdout.strip().splitlines()
    assert re.match(r"method\s+TI\s+keeps\s+NLL site_a", lines[0])
    assert [line.split()[0] for line in lines[1:4]] == [BEFORE, "ts", "ms_c"]
    assert [f"- {sentence}" for sentence in tiny[1].findings] == [line for line in lines if line.startswith("- ")]
    assert lines[-1] == f"The page: {tiny[1].page}"


def test_command_gives_one_json_object(command: Callable[..., Result]) -> None:
    done = command("--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert Path(result["page"]).is_file()
    assert Path(result["page"]).is_absolute()
    assert [pipeline["name"] for pipeline in result["pipelines"]] == [BEFORE, "ts", "ms_c"]
    for pipeline in result["pipelines"]:
        for numbers in pipeline["groups"].values():
            assert set(numbers) == {column.key for column in COLUMNS}
            assert all(math.isfinite(value) for value in numbers.values())


def test_quiet_command_prints_nothing(command: Callable[..., Result]) -> None:
    done = command("--quiet")
    assert (done.exit_code, done.output) == (0, "")


def test_command_has_a_working_example() -> None:
    assert cli.demo.demo.example.startswith("segcal demo")  # type: ignore[attr-defined]


@pytest.mark.slow
def test_full_demo_shows_what_it_is_meant_to_show(tmp_path: Path) -> None:
    result = run_demo(tmp_path, device=CPU)
    scores = result.scores
    assert scores.pipelines == [BEFORE, *DemoPlan().methods]
    assert len(scores.groups["site_a"]) == len(scores.groups["site_b"]) == 6
    assert scores.n_moved_on_disk == 0
    for site in scores.groups:
        before = scores.mean(BEFORE, site, "nll")
        for name in DemoPlan().methods:
            if CALIBRATORS[name].translation_invariant:
                assert scores.mean(name, site, "nll") < before
                assert scores.mean(name, site, "ece") < 0.5 * scores.mean(BEFORE, site, "ece")
            if CALIBRATORS[name].preserves:
                assert scores.mean(name, site, "flip") == 0
                assert scores.mean(name, site, "dsc") == scores.mean(BEFORE, site, "dsc")
    # Offsets: ms wins at home by reading them and loses to its translation-invariant twin where they differ.
    assert scores.mean("ms", "site_a", "nll") < scores.mean("ms_c", "site_a", "nll")
    assert scores.mean("ms", "site_b", "nll") > scores.mean("ms_c", "site_b", "nll")
    assert "does harm elsewhere" in result.page.read_text(encoding="utf-8")
    shown = [case for case in scores.shown.values() if case.group == "site_b"]
    assert list(shown[0].maps) == ["cms_ap", "ms"]
    pictures = list(slice_pictures(scores, ("background", "organ", "lesion", "vessel")))
    slices = {re.search(r"slice \d+", picture.alt)[0] for picture in pictures if shown[0].case_id in picture.name}  # type: ignore[index]
    assert len(slices) == 1  # both methods show the same slice of a case
