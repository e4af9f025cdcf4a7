"""Muon: orthogonalised steps, lane by lane."""

from __future__ import annotations

import torch

from kog_dist.train.muon import Muon, orthogonalise


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    matrices = torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(0)) * 7
    for shaped in (matrices, matrices.mT):
        values = torch.linalg.svdvals(orthogonalise(shaped))
        assert float(values.min()) > 0.6
        assert float(values.max()) < 1.3


def test_muon_moves_against_the_gradient_lane_by_lane() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 4, 4))
    parameter.grad = torch.stack((torch.eye(4), -100 * torch.eye(4)))
    Muon([parameter], weight_decay=0.0).step(0.1)
    first, second = parameter.detach()
    assert torch.allclose(first, -second, atol=1e-3)  # the size of a lane's gradient does not matter
    assert torch.all(first.diagonal() < -0.02)
