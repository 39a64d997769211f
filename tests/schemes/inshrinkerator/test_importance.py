"""Importance is what the formulas say, in float32, whatever the weights are kept in."""

from __future__ import annotations

import pytest
import torch

from shrinkpoint.schemes.inshrinkerator.partition import magnitude, sensitivity

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_magnitude_is_the_size_of_a_weight(dtype):
    weights = torch.tensor([[-1.5, 0.0], [2.0, -0.25]], dtype=dtype, requires_grad=True)
    found = magnitude(weights)
    assert found.dtype == torch.float32 and not found.requires_grad
    assert found.tolist() == [[1.5, 0.0], [2.0, 0.25]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sensitivity_is_the_size_of_gradient_times_weight(dtype):
    weights = torch.tensor([-1.5, 0.0, 2.0, 3.0], dtype=dtype, requires_grad=True)
    found = sensitivity(weights, torch.tensor([2.0, 5.0, -0.5, 0.0]))
    assert found.dtype == torch.float32 and not found.requires_grad
    assert found.tolist() == [3.0, 0.0, 1.0, 0.0]


def test_sensitivity_predicts_what_the_loss_loses_with_a_weight():
    weights = torch.tensor([0.3, -0.002, 0.001], dtype=torch.float64, requires_grad=True)
    inputs = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)

    def loss(w):
        return torch.tanh(w @ inputs)

    loss(weights).backward()
    for i in (1, 2):
        without = weights.detach().clone()
        without[i] = 0
        change = (loss(without) - loss(weights)).abs().item()
        assert sensitivity(weights, weights.grad)[i].item() == pytest.approx(change, rel=0.01)


def test_neither_changes_its_arguments():
    weights, gradients = torch.tensor([-1.0, 2.0]), torch.tensor([-3.0, 4.0])
    magnitude(weights), sensitivity(weights, gradients)
    assert weights.tolist() == [-1.0, 2.0] and gradients.tolist() == [-3.0, 4.0]
