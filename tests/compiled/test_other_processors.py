"""Loops give the same bits whatever instructions a processor has: workers of a cluster need not be alike."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from segcal.calibrators import CALIBRATORS

SCORES_AND_MAPS = """
import hashlib
import numpy as np, torch
from segcal.calibrators import CALIBRATORS
from segcal.fitting.voxel_pass import CompiledPass
from tests.conformance.drawn import draw_calibrator
generator = np.random.default_rng(0)
logits = torch.from_numpy(generator.integers(-900, 900, (4, 3000)).astype(np.float32) / 64)
labels, decision = torch.from_numpy(generator.integers(0, 4, 3000)), logits.max(0).indices
work = CompiledPass(0, "case", logits, labels, decision, None)
noted, sums = work.block(0, 3000, (0.0,) * 4), work.sums()
found = {"scores": noted.priority.numpy().tobytes() + repr(sums).encode()}
for name in CALIBRATORS:
    probs = draw_calibrator(name, 4).volume_probs(logits.reshape(4, 3, 20, 50), decision.reshape(3, 20, 50))
    found[name] = probs.numpy().tobytes()
for name, content in found.items():
    print(name, hashlib.sha256(content).hexdigest())
"""

PLAIN = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "ATEN_CPU_CAPABILITY": "default"}
"""No instruction beyond those every processor has, neither in our loops nor in torch."""


@pytest.mark.slow
def test_a_processor_without_vectors_and_fused_operations_gives_the_same_bits(tmp_path: Path) -> None:
    """No library function whose last bit depends on the machine takes part; the compiler fuses nothing by itself."""
    settings = {"host": {}, "generic": PLAIN}
    found = {
        name: subprocess.run(
            [sys.executable, "-c", SCORES_AND_MAPS],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / name), **variables},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        ).stdout.splitlines()
        for name, variables in settings.items()
    }
    assert len(found["host"]) == 1 + len(CALIBRATORS)
    assert found["generic"] == found["host"]
