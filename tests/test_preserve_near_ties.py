"""A decision made elsewhere breaks near-ties of averaged probabilities and touches nothing else."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from segcal.preserve import NEAR_TIE, keep_near_ties


def test_only_near_ties_follow_the_decision() -> None:
    probs = torch.tensor([[0.5, 0.5, 0.6], [0.5 - 3e-7, 0.5 - 1e-4, 0.4]])
    before = probs.clone()
    said = keep_near_ties(probs, torch.tensor([1, 1, 1]), regions=False)

    assert said.tolist() == [1, 0, 0]
    assert probs.argmax(0).tolist() == [1, 0, 0]
    assert torch.equal(probs[:, 1:], before[:, 1:])
    assert float((probs - before).abs().max()) <= NEAR_TIE


def test_regions_near_one_half_follow_the_decision() -> None:
    probs = torch.tensor([[0.5, 0.5 + 3e-7, 0.5001, 0.4]])
    said = keep_near_ties(probs, torch.tensor([[True, False, False, True]]), regions=True)

    assert said.tolist() == [[True, False, True, False]]
    assert (probs > 0.5).tolist() == said.tolist()


@given(st.integers(0, 10_000), st.integers(2, 5))
def test_what_is_returned_is_what_the_map_says(seed: int, n_classes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(torch.randn((n_classes, 50), generator=generator).mul(3).round(), 0)
    decision = torch.randint(n_classes, (50,), generator=generator)
    before = probs.clone()
    said = keep_near_ties(probs, decision, regions=False)

    assert torch.equal(probs.max(0).indices, said)
    assert float((probs - before).abs().max()) <= NEAR_TIE
