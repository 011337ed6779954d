"""CPU seconds of the distance bands of BA-ECE for the labels of a manifest's cases.

python benchmarks/_bands.py MANIFEST
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from segcal.case_labels import read_case_labels, targets
from segcal.io.archive import read_npz_header
from segcal.manifest import Manifest
from segcal.metrics import MetricSettings
from segcal.metrics.distance import distance_bands
from segcal.types import IGNORED


def main() -> None:
    """Time the bands alone and print the seconds as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    manifest = Manifest.load(parser.parse_args().manifest)
    edges = MetricSettings(manifest.class_names).band_edges
    seconds = 0.0
    for case in manifest.cases:
        _, depth, height, width = read_npz_header(manifest.resolve(case.members[0]))[manifest.kind].shape
        label_map = read_case_labels(manifest, case, (depth, height, width), None)
        labels, _, _ = targets(manifest, case, label_map, torch.device("cpu"))
        assert labels is not None
        begin = time.process_time()
        distance_bands(labels.numpy(), edges, ignored=IGNORED)
        seconds += time.process_time() - begin
    print(json.dumps({"cpu_s": seconds}))


if __name__ == "__main__":
    main()
