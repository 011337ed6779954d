"""Interleaved training: who sees which data, and in which order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from segcal.classification.losses import Composite, held_out_split, interleaved_epoch, make_loss
from segcal.errors import ParameterError


class Recorder(nn.Module):
    def __init__(self, name: str, seen: list[tuple[str, float]]) -> None:
        super().__init__()
        self.name, self.seen = name, seen

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.seen.append((self.name, float(labels[0])))
        return logits.square().mean()


def test_the_secondary_loss_comes_after_the_primary_and_sees_held_out_batches_only() -> None:
    seen: list[tuple[str, float]] = []
    model = nn.Linear(2, 2)
    batches = [(torch.ones(4, 2), torch.full((4,), k)) for k in range(5)]
    interleaved_epoch(
        model.eval(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        majority=batches[:3],
        held_out=batches[3:],
        primary=Recorder("primary", seen),
        secondary=Recorder("secondary", seen),
    )
    assert seen == [("primary", 0), ("primary", 1), ("primary", 2), ("secondary", 3), ("secondary", 4)]
    assert model.training


@pytest.mark.parametrize("beta", [0.0, 1.0, 3.0])
def test_an_epoch_is_plain_steps_on_one_loss_after_the_other(beta: float) -> None:
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.normal(size=(40, 3))).float()
    labels = torch.from_numpy(rng.integers(0, 4, 40))
    models = [nn.Linear(3, 4), nn.Linear(3, 4)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    primary, secondary = make_loss("focal"), make_loss("sb_ece")
    found = interleaved_epoch(
        models[0],
        optimizers[0],
        majority=[(inputs[:30], labels[:30])],
        held_out=[(inputs[30:], labels[30:])],
        primary=primary,
        secondary=secondary,
        beta=beta,
    )
    values = []
    for loss, factor, part in ((primary, 1.0, slice(0, 30)), (secondary, beta, slice(30, 40))):
        optimizers[1].zero_grad()
        value = loss(models[1](inputs[part]), labels[part])
        (factor * value).backward()
        optimizers[1].step()
        values.append(value.item())
    assert [found.primary, found.secondary] == values
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_parts_without_batches_are_nan() -> None:
    model = nn.Linear(2, 2)
    loss = Composite(make_loss("ce"), make_loss("mmce_w"))
    found = interleaved_epoch(
        model, torch.optim.SGD(model.parameters()), majority=[], held_out=[], primary=loss, secondary=loss
    )
    assert math.isnan(found.primary)
    assert math.isnan(found.secondary)


def test_the_split_is_a_partition_of_the_asked_share_and_follows_the_seed() -> None:
    majority, held_out = held_out_split(200, 0.1, seed=3)
    assert len(held_out) == 20
    np.testing.assert_array_equal(np.sort(np.concatenate([majority, held_out])), np.arange(200))
    np.testing.assert_array_equal(held_out_split(200, 0.1, seed=3)[1], held_out)
    assert not np.array_equal(held_out_split(200, 0.1, seed=4)[1], held_out)
    assert len(held_out_split(2, 0.01)[1]) == 1
    with pytest.raises(ParameterError, match="fraction"):
        held_out_split(200, 1.0)
