"""The largest class, and where it is not the wanted one: the loops find what the torch operations find."""

from __future__ import annotations

import pytest
import torch

from segcal.compiled.flat_rows import flat_rows
from segcal.pooling import _largest, _largest_by_loop
from segcal.preserve import _differing, _differing_by_loop


@pytest.mark.parametrize("n_classes", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
@pytest.mark.parametrize("n_voxels", [1, 511, 512, 513, 2000])
def test_the_loop_finds_the_same_voxels_ties_included(n_classes: int, dtype: torch.dtype, n_voxels: int) -> None:
    generator = torch.Generator().manual_seed(n_voxels)
    steps = torch.randint(0, 4, (n_classes, n_voxels), generator=generator).float() + 0.25
    probs = steps / steps.sum(0)
    wanted = torch.randint(0, n_classes, (n_voxels,), generator=generator)
    wanted = torch.where(torch.rand(n_voxels, generator=generator) < 0.5, probs.max(0).indices, wanted)

    assert torch.equal(_differing_by_loop(probs, wanted.to(dtype)), _differing(probs, wanted))


@pytest.mark.parametrize("place", [0, 1, 255, 511])
@pytest.mark.parametrize("others", ["tied", "behind"])
def test_one_voxel_of_another_class_in_a_block_is_found(place: int, others: str) -> None:
    """The usual block of a volume: all but certain background, and somewhere a voxel that lost its decision."""
    probs = torch.tensor([[0.9], [0.05], [0.05]]).repeat(1, 512)
    wanted = torch.zeros(512, dtype=torch.int64)
    wanted[place] = 1
    probs[:, place] = torch.tensor([0.5, 0.5, 0.0] if others == "tied" else [0.6, 0.4, 0.0])
    assert _differing_by_loop(probs, wanted.to(torch.uint8)).tolist() == [place]
    assert _differing(probs, wanted).tolist() == [place]


@pytest.mark.parametrize("n_classes", [1, 2, 7, 300])
@pytest.mark.parametrize("n_voxels", [0, 1, 511, 512, 513, 2000])
def test_the_loop_finds_the_first_largest_class(n_classes: int, n_voxels: int) -> None:
    generator = torch.Generator().manual_seed(n_voxels)
    logits = torch.randint(-3, 4, (n_classes, n_voxels), generator=generator).float()  # ties in most voxels

    found = _largest_by_loop(logits, torch.int64)

    assert found.dtype == torch.int64
    assert found.tolist() == [row.index(max(row)) for row in logits.T.tolist()]
    assert torch.equal(found, _largest(logits, torch.int64))


@pytest.mark.parametrize("n_classes", [256, 257, 300])
def test_every_class_is_found_whether_or_not_it_fits_into_a_byte(n_classes: int) -> None:
    every = torch.arange(n_classes)
    assert _largest_by_loop(torch.eye(n_classes), torch.int64).tolist() == every.tolist()
    assert _differing_by_loop(torch.eye(n_classes), every).tolist() == []
    assert _differing_by_loop(torch.eye(n_classes), every.roll(1)).tolist() == every.tolist()


@pytest.mark.parametrize("layout", ["whole", "cut", "transposed", "every second", "one class repeated"])
def test_flat_rows_hold_every_value_where_they_say(layout: str) -> None:
    values = torch.arange(60.0).reshape(5, 12)
    cut = {
        "whole": values,
        "cut": values[1:, 3:9],
        "transposed": values.T,
        "every second": values[:, ::2],
        "one class repeated": values[:1].expand(3, 12),
    }[layout]
    rows, stride = flat_rows(cut)
    for c in range(cut.shape[0]):
        assert rows[c * stride : c * stride + cut.shape[1]].tolist() == cut[c].tolist()


def test_a_cut_is_not_copied() -> None:
    values = torch.zeros(3, 10)
    rows, _ = flat_rows(values[:, 4:8])
    values[2, 7] = 1.0
    assert rows[-1] == 1.0
