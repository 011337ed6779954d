"""fit, apply and evaluate on BraTS-shaped cases, each against the floor measured in the same run.

Everything runs in a process of its own: CPU seconds (user and system), wall seconds and peak memory are its own, start
of Python and imports included, in the floor as well. Data are made when missing (13 CPU seconds a case) and kept in
the folder given, in $SEGCAL_BENCH_DATA, or in the folder for temporary files.

    python benchmarks/brats.py [--quick] [--part fit apply probabilities evaluate] [--cases 5 10 20] [--data FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from _brats import BRATS_SHAPE, Shape, brats_manifest, data_folder
from _children import Cost, script, segcal
from _results import Entry, entry, record

from segcal.evaluation.study_settings import load_study_settings
from segcal.types import Kind, Pooling

METHODS = ("ts", "ets", "vs", "ms_c", "dc", "cdc", "cms_ap", "cms_op")
PARTS = ("fit", "apply", "probabilities", "evaluate")
SMALL: Shape = (31, 48, 48)
"""Cases of this shape are enough to have a calibrator of every kind."""

FIT_TARGET, APPLY_TARGET, EVALUATE_TARGET, BANDS_TARGET, MEMORY_TARGET_MB = 2.0, 1.5, 6.0, 0.25, 1500.0


@dataclass
class Bench:
    """One run: where the data are, how large, and what was found so far."""

    data: Path
    scratch: Path
    shape: Shape
    cases: list[int]
    n_few: int
    trials: int
    n_turns: int
    entries: list[Entry] = field(default_factory=list)

    def manifest(self, n_cases: int, kind: Kind = "logits") -> Path:
        return brats_manifest(n_cases, kind=kind, shape=self.shape, folder=self.data)

    def floor(self, n_cases: int, kind: Kind = "logits") -> Cost:
        cost = script("_floor.py", self.manifest(n_cases, kind))
        self.show(f"floor, {n_cases} cases of {kind}", cost)
        return cost

    def show(self, name: str, cost: Cost, floor: Cost | None = None, note: str = "") -> None:
        ratios = "| | " if floor is None else f"| {cost.cpu_s / floor.cpu_s:.2f} | {cost.wall_s / floor.wall_s:.2f} "
        row = f"| {name} | {cost.cpu_s:.1f} | {cost.wall_s:.1f} | {cost.peak_mb:.0f} {ratios}| {note} |"
        print(row, flush=True)

    def keep(self, name: str, cost: Cost, floor: Cost, target: float | None, *, memory: bool = True) -> None:
        """The entries every measured command has; the target is one of CPU seconds, wall time stands beside it."""
        self.entries += [
            entry(f"brats/{name}/cpu", cost.cpu_s, "s"),
            entry(f"brats/{name}/wall", cost.wall_s, "s"),
            entry(f"brats/{name}/cpu over floor", cost.cpu_s / floor.cpu_s, "x", target),
            entry(f"brats/{name}/wall over floor", cost.wall_s / floor.wall_s, "x"),
            entry(f"brats/{name}/peak memory", cost.peak_mb, "MB", MEMORY_TARGET_MB if memory else None),
        ]


def compile_loops(bench: Bench) -> None:
    """Let small runs of all that is measured compile the loops, into a folder of this run: no other pays for it then.

    What the first run of an installation pays for is thereby measured too.
    """
    small, calibrators = brats_manifest(3, shape=SMALL, folder=bench.data), fitted_calibrators(bench)
    os.environ["NUMBA_CACHE_DIR"] = str(bench.scratch / "loops")
    options = [part for path in calibrators.values() for part in ("--calibrator", path)]
    out = bench.scratch / "small"

    def run_all() -> float:
        done = [
            script("_fit.py", small, out / "fit", "--trials", 1, "--method", *METHODS),
            segcal("apply", calibrators["cms_ap(z)"], small, "--out", out / "apply", "--quiet"),
            segcal("evaluate", small, "--out", out / "evaluate", "--quiet", *options),
        ]
        shutil.rmtree(out)
        return sum(cost.cpu_s for cost in done)

    first, second = run_all(), run_all()
    print(f"compiling the loops, once an installation: {first - second:.1f} CPU s")
    bench.entries.append(entry("brats/compiling the loops", first - second, "s"))


def measure_fit(bench: Bench) -> None:
    """The curve over the number of cases; the target belongs to the longest."""
    solving = {}
    for n_cases in bench.cases:
        floor = bench.floor(n_cases)
        out = bench.scratch / f"fit_{n_cases}"
        manifest = bench.manifest(n_cases)
        cost = script("_fit.py", manifest, out, "--trials", bench.trials, "--method", *METHODS)
        said = cost.said()
        note = f"reading {said['read_cpu_s']:.1f}, solving {said['solve_cpu_s']:.1f} CPU s"
        bench.show(f"fit {len(METHODS)} methods, {n_cases} cases", cost, floor, note)
        name = f"fit {n_cases} cases"
        bench.keep(name, cost, floor, FIT_TARGET if n_cases == max(bench.cases) else None)
        bench.entries += [entry(f"brats/{name}/{key[:-2]}", value, "s") for key, value in said.items()]
        solving[n_cases] = said["solve_cpu_s"]
    most, fewest = max(solving), min(solving)
    growth = solving[most] / solving[fewest]
    print(f"solving on {most} cases takes {growth:.2f} times that on {fewest}")
    bench.entries.append(entry(f"brats/fit/solving {most} over {fewest} cases", growth, "x", 1.25))


def measure_apply(bench: Bench) -> None:
    """float32 and float16 maps, against reading, pooling, packing and writing the same maps."""
    for dtype in ("float32", "float16"):
        apply_one(bench, fitted_calibrators(bench)["cms_ap(z)"], bench.manifest(bench.n_few), dtype, f"apply {dtype}")


def apply_one(bench: Bench, calibrator: Path, manifest: Path, dtype: str, name: str) -> None:
    """An apply run and the floor of the maps it wrote, in turns; of each the cheaper run counts.

    On a virtual machine whoever first touches memory pays for the host's handing it over: up to 1.7 CPU s of 9.
    """
    out, packed = bench.scratch / "apply", bench.scratch / "apply_floor"
    costs, floors = [], []
    for _ in range(bench.n_turns):
        costs.append(segcal("apply", calibrator, manifest, "--out", out, "--dtype", dtype, "--quiet"))
        floor = script("_floor.py", manifest, "--maps", out, "--out", packed)
        floors.append(floor.without(**floor.said()))
        shutil.rmtree(out)
        shutil.rmtree(packed)
    cost, floor = cheaper(costs), cheaper(floors)
    bench.show(f"floor of {name}", floor)
    bench.show(f"{name} with {calibrator.stem}", cost, floor)
    bench.keep(name, cost, floor, APPLY_TARGET)


def cheaper(costs: list[Cost]) -> Cost:
    """The run of the fewest CPU seconds, with the largest memory of all."""
    return replace(min(costs, key=lambda cost: cost.cpu_s), peak_mb=max(cost.peak_mb for cost in costs))


def measure_probabilities(bench: Bench) -> None:
    """float32 probabilities as nnU-Net writes them, pooled as `nnUNetv2_ensemble` does: fit, and apply of that fit."""
    n_cases = max(bench.n_few, 2)  # one of them validates
    manifest, floor = bench.manifest(n_cases, "probabilities"), bench.floor(n_cases, "probabilities")
    out = bench.scratch / "fit_probabilities"
    options = ("--trials", bench.trials, "--pooling", "probabilities", "--method", *METHODS)
    cost = script("_fit.py", manifest, out, *options)
    said = cost.said()
    note = f"reading {said['read_cpu_s']:.1f}, solving {said['solve_cpu_s']:.1f} CPU s"
    bench.show(f"fit {len(METHODS)} methods, {n_cases} cases of probabilities", cost, floor, note)
    bench.keep("fit probabilities", cost, floor, None)
    bench.entries += [entry(f"brats/fit probabilities/{key[:-2]}", value, "s") for key, value in said.items()]
    apply_one(bench, out / "cms_ap.safetensors", manifest, "float32", "apply probabilities float32")


def measure_evaluate(bench: Bench) -> None:
    """Every pipeline of SEG Table 4 in one read, all of them together and those without a network of their own."""
    manifest = bench.manifest(bench.n_few)
    floor = bench.floor(bench.n_few)
    bands = script("_bands.py", manifest).said()["cpu_s"]
    calibrators = fitted_calibrators(bench)
    voxelwise = {name: path for name, path in calibrators.items() if not name.startswith("lts")}
    for what, chosen in (("Table 4", calibrators), ("Table 4 without lts", voxelwise)):
        out = bench.scratch / "evaluate"
        options = [part for path in chosen.values() for part in ("--calibrator", path)]
        cost = segcal("evaluate", manifest, "--out", out, "--quiet", *options)
        note = f"bands {bands:.1f} CPU s"
        bench.show(f"evaluate {what} ({len(chosen)} + 3), {bench.n_few} cases", cost, floor, note)
        bench.keep(f"evaluate {what}", cost, floor, EVALUATE_TARGET)
        bench.entries.append(entry(f"brats/evaluate {what}/share of bands", bands / cost.cpu_s, "", BANDS_TARGET))
        shutil.rmtree(out)


def fitted_calibrators(bench: Bench) -> dict[str, Path]:
    """A calibrator file for every pipeline of Table 4, fitted on a few small cases; kept beside the data."""
    home = bench.data / "calibrators"
    wanted: dict[Pooling, list[str]] = {}
    for pipeline in load_study_settings("paper").pipelines:
        wanted.setdefault(pipeline.pooling, []).append(pipeline.method)
    found = {}
    for pooling, methods in wanted.items():
        paths = {method: home / pooling / f"{method}.safetensors" for method in methods}
        if not all(path.is_file() for path in paths.values()):
            small = brats_manifest(3, shape=SMALL, folder=bench.data)
            options = ("--trials", 1, "--max-patches", 64, "--pooling", pooling)
            script("_fit.py", small, home / pooling, *options, "--method", *methods)
        found.update({f"{method}({pooling[0].replace('l', 'z')})": path for method, path in paths.items()})
    return found


STEPS: dict[str, Callable[[Bench], None]] = {
    "fit": measure_fit,
    "apply": measure_apply,
    "probabilities": measure_probabilities,
    "evaluate": measure_evaluate,
}


def main(arguments: Iterable[str] | None = None) -> None:
    """Print one table and write the entries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and few cases: shows that it runs, not how fast")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cases", type=int, nargs="+", help="of the fit (5 10 20)")
    parser.add_argument("--few", type=int, help="cases of apply and evaluate (3)")
    parser.add_argument("--trials", type=int, help="of every method (20)")
    parser.add_argument("--shape", type=int, nargs=3)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args(None if arguments is None else list(arguments))
    quick = options.quick
    shape: Shape = tuple(options.shape or ((62, 96, 96) if quick else BRATS_SHAPE))
    with TemporaryDirectory(prefix="segcal-bench-") as scratch:
        bench = Bench(
            data=data_folder(options.data),
            scratch=Path(scratch),
            shape=shape,
            cases=sorted(options.cases or ([2, 4] if quick else [5, 10, 20])),
            n_few=options.few or (1 if quick else 3),
            trials=options.trials or (3 if quick else 20),
            n_turns=1 if quick else 2,
        )
        bench.manifest(max(*bench.cases, bench.n_few))  # data are made before anything is measured
        if not quick:
            compile_loops(bench)
        if "probabilities" in options.part:
            bench.manifest(max(bench.n_few, 2), "probabilities")
        print(f"{'x'.join(map(str, shape))}, 5 classes, 5 members, float16 logits unless said")
        print("| what | CPU s | wall s | peak MB | CPU / floor | wall / floor | note |\n|---|---|---|---|---|---|---|")
        for part in options.part:
            STEPS[part](bench)
        record(bench.entries, quick=quick)


if __name__ == "__main__":
    main()
