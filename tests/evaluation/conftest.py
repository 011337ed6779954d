"""One small synthetic ensemble with three given splits, made once for all tests of evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from segcal.demo.phantom import make_phantom
from segcal.fitted import FittedCalibrator
from segcal.fitting.run import fit_many
from segcal.manifest import Manifest


@pytest.fixture(scope="session")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Ten small cases of two sites with three members; splits 0-2 share no test case."""
    path = make_phantom(
        tmp_path_factory.mktemp("phantom"), seed=3, n_cases=10, n_other_site=2, shape=(8, 20, 20), n_members=3
    )
    drawn = Manifest.load(path)
    ids = sorted(case.id for case in drawn.cases)
    splits = []
    for repeat in range(3):
        test = ids[3 * repeat : 3 * repeat + 3]
        rest = [case_id for case_id in ids if case_id not in test]
        splits.append({"calibration": rest[:5], "validation": rest[5:], "test": test})
    content = drawn.model_dump(mode="json", exclude_none=True) | {"splits": splits}
    return Manifest.from_content(content, path).save(path)


@pytest.fixture(scope="session")
def fitted(phantom: Manifest) -> dict[str, FittedCalibrator]:
    """Three calibrators of split 0, penalties fixed so that nothing is tuned."""
    return fit_many(phantom, ["ts", "ms", "cms_ap"], split=0, lambda_=1e-3, mu=1e-3, device="cpu")


def files_below(folder: Path) -> dict[str, bytes]:
    """Everything in a folder, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
