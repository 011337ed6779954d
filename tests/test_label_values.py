"""Values of label maps are counted whatever integer type they have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from segcal.label_values import label_counts


@pytest.mark.parametrize(
    ("values", "dtype", "counts"),
    [
        ([0, 2, 2], np.uint8, {0: 1, 2: 2}),
        ([-128, 127], np.int8, {-128: 1, 127: 1}),
        ([-1, 0, -1], np.int32, {-1: 2, 0: 1}),
        ([2**31 - 1, -(2**31), 0], np.int32, {-(2**31): 1, 0: 1, 2**31 - 1: 1}),
        ([2**63 + 5, 2**63 + 5], np.uint64, {2**63 + 5: 2}),
        ([], np.uint8, {}),
    ],
)
def test_every_value_is_counted(values: list[int], dtype: Any, counts: dict[int, int]) -> None:
    assert label_counts(np.array(values, dtype=dtype).reshape(1, 1, -1)) == counts
