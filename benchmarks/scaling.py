"""Strong and weak scaling over worker processes, what a task costs by itself, and what the client does alone.

    python benchmarks/scaling.py                                  small generated cases, about two minutes
    python benchmarks/scaling.py --manifest M.yaml --cases 4      cases of your own, for example of BraTS size

Every figure is measured in this run; ratios are against one process without Dask. docs/scaling.md says what follows
from them for 10,000 cases.
"""

from __future__ import annotations

import argparse
import pickle
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

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
from segcal.scale import open_cluster
from segcal.threads import one_thread

CPU = torch.device("cpu")
TASKS = 200


def nothing(item: int) -> int:
    """A task that costs nothing but being a task."""
    return item


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def stages(
    manifest: Manifest, fitted: FittedCalibrator, ids: Sequence[str], folder: Path, case_map: CaseMap
) -> dict[str, float]:
    """Wall seconds of reading for a fit, of apply and of evaluate over the cases."""
    sizes = SampleSizes(DEFAULT_ROWS, 0, 0)
    out = folder / "applied"
    shutil.rmtree(out, ignore_errors=True)
    with one_thread():
        return {
            "fit: reading": seconds(
                lambda: gather(manifest, ids, pooling="logits", sizes=sizes, device=CPU, case_map=case_map)
            ),
            "apply": seconds(lambda: apply_calibrator(fitted, manifest, out, device=CPU, cases=ids, case_map=case_map)),
            "evaluate": seconds(lambda: evaluate(manifest, [fitted], cases=ids, device=CPU, case_map=case_map)),
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
            cost.append(seconds(lambda sent=sent: whole.merge(pickle.loads(sent).rows[0])))
    print(f"fit, client: {1000 * statistics.mean(cost):.1f} ms a case to unpack and merge its sample")
    print("fit, result: " + ", ".join(f"{each / 1e6:.2f}" for each in size) + " MB, case after case")
    kilobytes = len(pickle.dumps(work)) / 1e3
    print(f"job with its manifest of {len(manifest.cases)} cases, sent once: {kilobytes:.1f} kB")
    record = load_record(folder / "applied")
    assert record is not None
    entry = next(iter(record.cases.values()))
    for n in (100, 1_000, 10_000):
        many = _many(record, entry, n)
        print(
            f"apply, client: {1000 * seconds(lambda many=many: many.save(folder)):.1f} ms to write run.json, {n} cases"
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
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = generated(folder, options.cases) if options.manifest is None else Manifest.load(options.manifest)
        ids = sorted(case.id for case in manifest.labelled_cases)[: options.cases]
        split = Split(calibration=tuple(ids[:2]))
        fitted = fit(manifest, method="ts", split=split, device=CPU)
        alone = stages(manifest, fitted, ids, folder, in_process)
        print(f"{len(ids)} cases; one process without Dask: " + ", ".join(f"{k} {v:.2f} s" for k, v in alone.items()))
        client_alone(manifest, ids, folder)
        for workers in options.workers:
            start = time.perf_counter()
            with open_cluster(workers=workers) as cases:
                opened = time.perf_counter() - start
                list(cases(nothing, range(20)))  # the workers have imported what they need
                each = seconds(lambda cases=cases: list(cases(nothing, range(TASKS)))) / TASKS
                print(
                    f"{workers} workers: start {opened:.1f} s, {1000 * each:.1f} ms for a task of nothing", flush=True
                )
                strong = stages(manifest, fitted, ids, folder, cases)
                part = ids[: max(1, len(ids) * workers // max(options.workers))]
                weak = stages(manifest, fitted, part, folder, cases)
            for stage in alone:
                print(
                    f"{workers} workers, {stage}: strong {strong[stage]:.2f} s for {len(ids)} cases "
                    f"({alone[stage] / strong[stage]:.2f} times one process), weak {weak[stage]:.2f} s for {len(part)}"
                )


if __name__ == "__main__":
    main()
