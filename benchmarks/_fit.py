"""One fit of several methods, with the CPU seconds of reading and of solving apart.

python benchmarks/_fit.py MANIFEST OUT --method ts vs [--trials 20] [--pooling logits]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from segcal.fitting.run import fit_many
from segcal.manifest import Manifest
from segcal.settings import PipelineSettings


def main() -> None:
    """Fit, save, and print the seconds as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", nargs="+", required=True)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--pooling", choices=("logits", "probabilities"), default="logits")
    parser.add_argument("--max-patches", type=int, default=4096)
    options = parser.parse_args()
    read_until = begin = (time.process_time(), time.perf_counter())

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal read_until
        if stage.endswith("cases"):
            read_until = (time.process_time(), time.perf_counter())

    settings = {
        name: PipelineSettings(method=name, pooling=options.pooling, solver="adam", max_patches=options.max_patches)
        for name in options.method
        if name.startswith("lts")
    }
    fitted = fit_many(
        Manifest.load(options.manifest),
        options.method,
        pooling=options.pooling,
        trials=options.trials,
        settings=settings,
        progress=progress,
    )
    end = time.process_time(), time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, calibrator in fitted.items():
        calibrator.save(options.out / f"{name}.safetensors")
    seconds = {
        "read_cpu_s": read_until[0] - begin[0],
        "read_wall_s": read_until[1] - begin[1],
        "solve_cpu_s": end[0] - read_until[0],
        "solve_wall_s": end[1] - read_until[1],
    }
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
