"""The floor every ratio is taken against: our own decoder and threads reading, inflating and averaging, nothing else.

No check of any value, no label, no decision. The floor of apply also packs and writes what apply wrote, taken from its
files, which are loaded before anything else; the seconds of that loading are printed and not counted.

    python benchmarks/_floor.py MANIFEST                      read, inflate, average
    python benchmarks/_floor.py MANIFEST --maps RUN --out DIR ... and pack and write the maps of a finished apply run
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from segcal.cases import MEMBERS_IN_MEMORY
from segcal.io.archive import AnyArray, open_npz, write_npz
from segcal.io.nifti import read_nifti, write_nifti
from segcal.manifest import Manifest
from segcal.types import Grid

_CHUNK_VALUES = 1 << 18


def main() -> None:
    """Run the floor and print, as JSON, the seconds of loading that do not belong to it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--maps", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    manifest = Manifest.load(options.manifest)
    begin = time.process_time(), time.perf_counter()
    finished = {} if options.maps is None else {case.id: _load(options.maps, case.id) for case in manifest.cases}
    loading = {"cpu_s": time.process_time() - begin[0], "wall_s": time.perf_counter() - begin[1]}
    for case_id in _averages(manifest):
        if case_id in finished:
            _write(options.out, case_id, *finished.pop(case_id))
    print(json.dumps(loading))


def _averages(manifest: Manifest) -> Iterator[str]:
    """Average the members of every case and let go of the result; the id says that a case is done."""
    owners = [case.id for case in manifest.cases for _ in case.members]
    paths = [manifest.resolve(member) for case in manifest.cases for member in case.members]
    total: Tensor | None = None
    with closing(_arrays(paths, manifest.kind)) as arrays:
        for owner, following in zip(owners, [*owners[1:], None], strict=True):
            total = _added(total, next(arrays))
            if owner != following:
                total /= manifest.n_members
                total = None
                yield owner


def _arrays(paths: Sequence[Path], key: str) -> Generator[AnyArray]:
    """Members of all cases in order, as many at a time as the library reads."""
    waiting, running = deque(paths), deque[Future[AnyArray]]()
    with ThreadPoolExecutor(MEMBERS_IN_MEMORY) as executor:
        while waiting or running:
            while waiting and len(running) < MEMBERS_IN_MEMORY:
                running.append(executor.submit(_read, waiting.popleft(), key))
            yield running.popleft().result()


def _read(path: Path, key: str) -> AnyArray:
    with open_npz(path) as reader:
        return reader.array(key)


def _added(total: Tensor | None, array: AnyArray) -> Tensor:
    values = torch.from_numpy(array).reshape(-1)
    if total is None:
        return values.to(torch.float32)
    for into, part in zip(total.split(_CHUNK_VALUES), values.split(_CHUNK_VALUES), strict=True):
        into += part
    return total


def _load(maps: Path, case_id: str) -> tuple[AnyArray, AnyArray, Grid]:
    segmentation, header = read_nifti(maps / f"{case_id}.nii.gz")
    return _read(maps / f"{case_id}.npz", "probabilities"), segmentation, header.grid


def _write(out: Path, case_id: str, probabilities: AnyArray, segmentation: AnyArray, grid: Grid) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_npz(out / f"{case_id}.npz", {"probabilities": probabilities})
    write_nifti(out / f"{case_id}.nii.gz", segmentation, affine=grid.affine)


if __name__ == "__main__":
    main()
