"""How many threads compute: one inside a block, whoever else is in one, and no more than allowed side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from segcal.threads import one_thread, side_by_side
from tests.fit_data import write_ensemble

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_block_limits_its_own_thread_while_another_thread_is_in_one() -> None:
    inside, leave = threading.Event(), threading.Event()

    @one_thread()
    def elsewhere() -> None:
        inside.set()
        leave.wait(60)

    other = threading.Thread(target=elsewhere)
    other.start()
    inside.wait(60)
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    leave.set()
    other.join()
    assert torch.get_num_threads() == 2
    assert side_by_side(lambda _: torch.get_num_threads(), range(4)) == [1] * 4


def test_blocks_nest_and_the_setting_comes_back() -> None:
    with one_thread():
        with one_thread():
            pass
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


COUNTED = """
import json, os, sys, threading
from pathlib import Path
started, start = [], threading.Thread.start
def noted(thread):
    started.append(thread.name.rsplit("_", 1)[0])
    start(thread)
threading.Thread.start = noted
import torch
from segcal.apply import apply_calibrator
from segcal.fitting.run import fit_many
from segcal.manifest import Manifest
manifest = Manifest.load(Path(sys.argv[1]))
fitted = fit_many(manifest, ["cms_ap"], pooling="logits", trials=2)["cms_ap"]
apply_calibrator(fitted, manifest, Path(sys.argv[2]), device=torch.device("cpu"))
print(json.dumps({"started": sorted(set(started)), "alive": len(os.listdir("/proc/self/task"))}))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
@pytest.mark.parametrize("n_threads", [1, 2])
def test_fit_and_apply_keep_to_the_number_of_threads_given(tmp_path: Path, n_threads: int) -> None:
    write_ensemble(tmp_path, n_cases=4)
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, str(tmp_path / "manifest.yaml"), str(tmp_path / "out")],
        # `make test` gives all three; torch takes the smallest.
        env={**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(n_threads))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    own = [name for name in found["started"] if name.startswith("segcal")]
    if n_threads == 1:
        assert (own, found["alive"]) == ([], 1)
    else:
        assert own == ["segcal-ahead", "segcal-read"]
