from __future__ import annotations

import numpy as np
import pytest
import torch
from contracts.quantizer import StableQuantizerSuite
from torch import Tensor

from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize.codebook import assign, kmeans_codebook, quantize_to_codebook, sample_weights


def counted(x: Tensor) -> tuple[Tensor, Tensor]:
    """The finest histogram there is."""
    return torch.unique(x.detach().double(), return_counts=True)


def sketched(x: Tensor) -> tuple[Tensor, Tensor]:
    """Relative cells of two per cent, as a sketch of one per cent has them."""
    wide = x.double()
    return torch.unique(wide.sign() * torch.exp2((wide.abs().log2() * 35).round() / 35), return_counts=True)


def laplace(count: int = 20_000, seed: int = 0) -> Tensor:
    u = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
    return (-u.sign() * (1 - 2 * u.abs()).log() * 0.02).float()


def masks(x: Tensor) -> dict[str, Tensor]:
    """The smallest magnitudes pruned, the largest protected, and some of them both."""
    size = x.detach().float().abs()
    order = torch.argsort(torch.argsort(size.reshape(-1))).reshape(x.shape)
    protected = order >= int(0.9 * x.numel())
    return {"pruned": (order < int(0.3 * x.numel())) | (protected & (order % 2 == 0)), "protected": protected}


class TestQuantize(StableQuantizerSuite):
    first = 2
    bins = (1, 2, 3, 16, 17, 18, 254)
    refused = (-1, 0, 255)

    def quantize(self, x: Tensor, bins: int):
        return quantize_to_codebook(x, kmeans_codebook(*counted(x), bins))

    def allowed(self, x, symbols):
        return (x.cpu()[..., None] - symbols.centers.double()).abs().amin(-1).to(x.device)

    def again(self, x, symbols):
        return quantize_to_codebook(x, symbols.centers)


class TestQuantizePrunedAndProtected(TestQuantize):
    def quantize(self, x, bins):
        return quantize_to_codebook(x, kmeans_codebook(*counted(x), bins), **masks(x))

    def allowed(self, x, symbols):
        allowed = torch.where(symbols.codes == 0, x.abs(), super().allowed(x, symbols))
        return torch.where(symbols.codes == 1, x.abs() / 256 + 2**-133, allowed)

    def again(self, x, symbols):
        return quantize_to_codebook(x, symbols.centers, pruned=symbols.codes == 0, protected=symbols.protected)

    def test_constant_tensor_is_kept(self, xs):  # but for what is pruned, and where bfloat16 cannot
        x = xs["constant"]
        kept = torch.tensor([0.0, float(x[0, 0]), float(x[0, 0].bfloat16())])
        assert torch.isin(self.quantize(x, 16).dequantize(x.dtype).float(), kept).all()

    def test_pruned_is_zero_protected_is_bfloat16_and_wins(self, xs):
        for x in xs.values():
            chosen = masks(x)
            symbols = self.quantize(x, 16)
            assert torch.equal(symbols.codes == 1, chosen["protected"])
            assert torch.equal(symbols.codes == 0, chosen["pruned"] & ~chosen["protected"])
            assert symbols.exact.dtype == torch.bfloat16
            assert (symbols.dequantize(x.dtype)[symbols.codes == 0] == 0).all()


def test_protected_values_are_rounded_to_the_nearest_even_in_row_major_order():
    x = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8], [-(1 + 2**-8 + 2**-20), 5.0]]).t()
    symbols = quantize_to_codebook(x, torch.zeros(1), protected=x != 5)
    assert symbols.exact.tolist() == [1.0, -(1 + 2**-7), 1 + 2**-6]
    assert symbols.codes.tolist() == [[1, 1], [1, 2]]


@pytest.mark.parametrize("name", ["pruned", "protected"])
def test_mask_of_another_shape_is_refused(name):
    with pytest.raises(PolicyError, match=name):
        quantize_to_codebook(torch.zeros(2, 3), torch.zeros(4), **{name: torch.zeros(3, dtype=torch.bool)})


def test_weights_are_shares_of_counts_and_of_magnitudes():
    values, counts = np.array([-3.0, 0.0, 1.0]), np.array([1, 6, 3])
    for sigma in (0.0, 0.2, 1.0):
        expected = sigma * np.array([0.1, 0.6, 0.3]) + (1 - sigma) * np.array([0.75, 0, 0.25])
        np.testing.assert_allclose(sample_weights(values, counts, sigma).numpy(), expected)
    assert sample_weights(np.zeros(4), np.ones(4)).tolist() == pytest.approx([0.25] * 4)


def cost(values: np.ndarray, weights: np.ndarray, centers: np.ndarray) -> float:
    return float((weights * np.square(values[:, None] - centers).min(1)).sum())


def test_less_sigma_moves_centers_to_large_weights():
    x = laplace()
    found = {
        sigma: quantize_to_codebook(x, kmeans_codebook(*counted(x), 16, sigma=sigma)).dequantize(x.dtype)
        for sigma in (0.2, 1.0)
    }
    largest = {sigma: (x - y).abs().max() for sigma, y in found.items()}
    mean = {sigma: (x - y).square().mean() for sigma, y in found.items()}
    assert largest[0.2] < 0.8 * largest[1.0] and mean[1.0] < mean[0.2]


def test_warm_start_stays_put_when_the_values_hardly_move():
    x = laplace()
    centers = kmeans_codebook(*sketched(x), 16)
    moved = sketched(x + 1e-3 * laplace(seed=1))
    assert torch.equal(kmeans_codebook(*moved, 16, init=centers), centers)
    assert not torch.equal(kmeans_codebook(*moved, 16), centers)


def test_warm_start_follows_values_that_move_and_keeps_their_codes():
    x = laplace()
    centers = kmeans_codebook(*sketched(x), 8)
    grown = sketched(1.1 * x)
    warm, fresh = kmeans_codebook(*grown, 8, init=centers), kmeans_codebook(*grown, 8, seed=1)
    weights = sample_weights(*grown).numpy()
    costs = [cost(grown[0].numpy(), weights, found.numpy()) for found in (warm, centers)]
    assert costs[0] < costs[1]
    before = assign(x, centers, 2)
    kept = [(assign(1.1 * x, found, 2) == before).float().mean() for found in (warm, fresh)]
    assert kept[0] > 0.9 > kept[1]


def test_centers_of_other_weights_are_no_start():
    """All values lie below the previous centers, so that nearly all of these would stay where they are."""
    values, counts = torch.linspace(0, 1, 200), torch.ones(200)
    found = kmeans_codebook(values, counts, 8, init=torch.linspace(100, 101, 8))
    assert torch.equal(found, kmeans_codebook(values, counts, 8))


def test_a_random_start_depends_on_the_seed_and_on_the_power_of_the_distance():
    values, counts = torch.linspace(-1, 1, 200) ** 3, torch.ones(200)
    starts = [
        kmeans_codebook(values, counts, 8, seed=seed, squared=squared, iterations=1)
        for seed, squared in ((0, True), (1, True), (0, False), (1, False), (0, True))
    ]
    assert len({tuple(centers.tolist()) for centers in starts}) == 4 and torch.equal(starts[0], starts[-1])


def test_warm_start_with_another_number_of_centers_is_refused():
    with pytest.raises(PolicyError, match="init: 8 centers; expected 16"):
        kmeans_codebook(*counted(laplace(100)), 16, init=torch.arange(8.0))


def test_values_without_counts_take_no_part():
    values, counts = np.array([-100.0, 1.0, 2.0, 100.0]), np.array([0, 5, 5, 0])
    assert kmeans_codebook(values, counts, 2).tolist() == [1.0, 2.0]
    assert kmeans_codebook(values, np.zeros(4), 2).tolist() == [0.0, 0.0]


def test_representatives_above_the_largest_float_are_clamped():
    centers = kmeans_codebook(np.array([-3.6e38, 1.0, 3.6e38]), np.ones(3), 3)
    assert centers.isfinite().all()
    x = torch.tensor([-65504.0, 1.0, 65504.0], dtype=torch.float16)
    assert torch.equal(quantize_to_codebook(x, torch.tensor([-65900.0, 1.0, 65900.0])).dequantize(x.dtype), x)
