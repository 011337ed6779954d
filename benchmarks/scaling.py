"""Strong and weak scaling over worker processes, what a task costs by itself, and what the client does alone.

    python benchmarks/scaling.py                                  small generated cases, about two minutes
    python benchmarks/scaling.py --manifest M.yaml --cases 4      cases of your own, for example of BraTS size

Every figure is measured in this run; ratios are against one process without Dask. docs/scaling.md says what follows
from them for 10,000 cases.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from _results import entry, record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the generator of the tests

from segcal.apply import apply_calibrator
from segcal.applying.record import CaseEntry, RunRecord, load_record
from segcal.case_map import CaseMap, in_process
from segcal.evaluation.run import evaluate
from segcal.fitted import FittedCalibrator
from segcal.fitting.case_sample import CaseToSample, SampleSizes, SampleWork
from segcal.fitting.condense import DEFAULT_ROWS, RowReservoir
from segcal.fitting.gather import gather
from segcal.fitting.run import fit
from segcal.manifest import Manifest, Split
from segcal.scale import DaskCases, open_cluster
from segcal.threads import allowed_threads, one_thread

CPU = torch.device("cpu")
TASKS = 200


def cpu(work: Callable[[], object]) -> float:
    """CPU seconds of this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def nothing(item: int) -> int:
    """A task that costs nothing but being a task."""
    return item


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Cost(NamedTuple):
    """Wall and CPU seconds, those of all processes together: on a busy machine only the second means something."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:.2f} s ({self.cpu:.2f} CPU s)"


def cpu_seconds(case_map: CaseMap) -> float:
    workers = case_map.client.run(time.process_time).values() if isinstance(case_map, DaskCases) else ()
    return time.process_time() + sum(workers)


def stages(
    manifest: Manifest, fitted: FittedCalibrator, ids: Sequence[str], folder: Path, case_map: CaseMap
) -> dict[str, Cost]:
    """What reading for a fit, apply and evaluate cost over the cases."""
    sizes, out = SampleSizes(DEFAULT_ROWS, 0, 0), folder / "applied"
    shutil.rmtree(out, ignore_errors=True)

    def cost(work: Callable[[], object]) -> Cost:
        before = cpu_seconds(case_map)
        wall = seconds(work)
        return Cost(wall, cpu_seconds(case_map) - before)

    return {
        "fit: reading": cost(
            lambda: gather(manifest, ids, pooling="logits", sizes=sizes, device=CPU, case_map=case_map)
        ),
        "apply": cost(lambda: apply_calibrator(fitted, manifest, out, device=CPU, cases=ids, case_map=case_map)),
        "evaluate": cost(lambda: evaluate(manifest, [fitted], cases=ids, device=CPU, case_map=case_map)),
    }


def client_alone(manifest: Manifest, ids: Sequence[str], folder: Path) -> None:
    """What happens in one process whatever the number of workers: it bounds the rate of all of them."""
    with one_thread():
        sizes, n_classes = SampleSizes(DEFAULT_ROWS, 0, 0), manifest.n_classes
        work = SampleWork(manifest, "logits", sizes, CPU)
        whole = RowReservoir(n_classes, 0, DEFAULT_ROWS)
        cost, size = [], []
        for case_id in ids:
            sent = pickle.dumps(work(CaseToSample(case_id, (whole.thresholds(),), ())))
            size.append(len(sent))
            cost.append(cpu(lambda sent=sent: whole.merge(pickle.loads(sent).rows[0])))
    print(f"fit, client: {1000 * statistics.mean(cost):.1f} ms CPU a case to unpack and merge its sample")
    print("fit, result: " + ", ".join(f"{each / 1e6:.2f}" for each in size) + " MB, case after case")
    kilobytes = len(pickle.dumps(work)) / 1e3
    print(f"job with its manifest of {len(manifest.cases)} cases, sent once: {kilobytes:.1f} kB")
    record = load_record(folder / "applied")
    assert record is not None
    entry = next(iter(record.cases.values()))
    for n in (100, 1_000, 10_000):
        many = _many(record, entry, n)
        print(
            f"apply, client: {1000 * cpu(lambda many=many: many.save(folder)):.1f} ms CPU to write run.json, {n} cases"
        )


def _many(record: RunRecord, entry: CaseEntry, n: int) -> RunRecord:
    return record.model_copy(update={"cases": {f"case_{k}": entry for k in range(n)}})


def generated(folder: Path, n_cases: int) -> Manifest:
    from tests.fit_data import write_ensemble

    return write_ensemble(folder, n_cases=n_cases, shape=(48, 128, 128))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", type=Path)
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = generated(folder, options.cases) if options.manifest is None else Manifest.load(options.manifest)
        ids = sorted(case.id for case in manifest.labelled_cases)[: options.cases]
        split = Split(calibration=tuple(ids[:2]))
        fitted = fit(manifest, method="ts", split=split, device=CPU)
        stages(manifest, fitted, ids[:1], folder, in_process)  # compiled loops are there
        alone = stages(manifest, fitted, ids, folder, in_process)
        print(
            f"{len(ids)} cases, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; "
            f"one process without Dask, {allowed_threads()} threads:"
        )
        print("\n".join(f"  {stage}: {cost}" for stage, cost in alone.items()))
        client_alone(manifest, ids, folder)
        strong, weak = dict[int, dict[str, Cost]](), dict[int, dict[str, Cost]]()
        for workers in options.workers:
            start = time.perf_counter()
            with open_cluster(workers=workers) as cases:
                opened = time.perf_counter() - start
                stages(manifest, fitted, ids[:workers], folder, cases)  # the workers have imported what they need
                each = cost_of_nothing(cases)
                print(f"{workers} workers: started in {opened:.1f} s; a task of nothing: {each}")
                strong[workers] = stages(manifest, fitted, ids, folder, cases)
                part = ids[: max(1, len(ids) * workers // max(options.workers))]
                weak[workers] = stages(manifest, fitted, part, folder, cases)
            for stage, cost in strong[workers].items():
                ratio = f"{alone[stage].wall / cost.wall:.2f} times as fast as one process"
                more = f"{cost.cpu / alone[stage].cpu:.2f} times its CPU"
                print(f"{workers} workers, {stage}: strong {cost} for {len(ids)} cases, {ratio}, {more}")
                print(f"{workers} workers, {stage}: weak {weak[workers][stage]} for {len(part)} cases")
        keep("small cases" if options.manifest is None else "given cases", strong, weak)


def keep(what: str, strong: Mapping[int, Mapping[str, Cost]], weak: Mapping[int, Mapping[str, Cost]]) -> None:
    """For the file of results: the most workers against the fewest."""
    few, many = min(strong), max(strong)
    if few == many:
        return
    for stage in strong[few]:
        name = f"scaling/{what}, {stage}, {many} workers over {few}"
        strong_ratio = strong[few][stage].wall / strong[many][stage].wall
        weak_ratio = weak[many][stage].wall / weak[few][stage].wall
        print(f"{name}: {strong_ratio:.2f} times as fast, as many cases a worker {weak_ratio:.2f} times as long")
        record([entry(f"{name}/strong", strong_ratio, "x"), entry(f"{name}/weak", weak_ratio, "x")])


def cost_of_nothing(cases: DaskCases) -> str:
    """Of one task, from asking for it to its result; the client's CPU is also the local scheduler's."""
    before = time.process_time()
    wall = seconds(lambda: list(cases(nothing, range(TASKS)))) / TASKS
    return f"{1000 * wall:.1f} ms, {1000 * (time.process_time() - before) / TASKS:.1f} ms CPU of client and scheduler"


if __name__ == "__main__":
    main()
