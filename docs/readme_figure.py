"""The figure of the README from a study: python docs/readme_figure.py STUDY docs/img/reliability.png."""

from __future__ import annotations

import sys
from pathlib import Path

from segcal.evaluation.records import Records
from segcal.metrics.bins import BinTable
from segcal.report.figures import figure_png
from segcal.report.reliability import reliability_figure

SHOWN = {"uncalibrated(z)": "uncalibrated", "ts(z)": "ts", "cms_ap(z)": "cms_ap", "lts_ti(z)": "lts_ti"}


def main() -> None:
    """Draw pooled voxels of all repeats and test cases."""
    study, target = (Path(argument) for argument in sys.argv[1:])
    records = Records.load(study)
    tables = {shown: BinTable.from_array(records.table("top_label_15", name)[0]) for name, shown in SHOWN.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(figure_png(reliability_figure(tables, title="Hippocampus test cases, all voxels")))


if __name__ == "__main__":
    main()
