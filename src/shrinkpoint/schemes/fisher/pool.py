"""What the scheme has to know of whole tensors, and of all of them: by itself, or together with other ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from torch import Tensor

from shrinkpoint.codec.lattice import Lattice, LatticeTensor
from shrinkpoint.codec.reference import QuantizedTensor, Reference
from shrinkpoint.quantize.entropy import entropy_bits, weight_std
from shrinkpoint.schemes.fisher.curvature import Curvature, estimate_curvatures
from shrinkpoint.schemes.fisher.moments import MIN_LATTICE_NUMEL, MomentPrecision, moments_to_lattices
from shrinkpoint.schemes.fisher.probe import MeasureLossIncrease, curvatures_from_probe, probe
from shrinkpoint.schemes.fisher.steps import geometric_mean_curvature, make_lattice
from shrinkpoint.schemes.select import TensorSelection, select_tensors, unchanged_tensors
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState

T = TypeVar("T")


class Pool:
    """Of one process, which has all of every tensor.

    `merged.Merged` is the same of several ranks, each of which has some boxes. There, what is asked of all weights is a
    collective: all ranks ask it, in the same order; what is asked of one weight is not.
    """

    @property
    def leads(self) -> bool:
        """Whether this process says aloud what is to be said once."""
        return True

    # of one weight

    def title(self, name: str) -> str:
        """What the whole weight is called."""
        return name

    def counts(self, name: str) -> bool:
        """Whether this process's numbers of a tensor count in sums."""
        return True

    def numel(self, name: str, x: Tensor) -> int:
        return x.numel()

    def deviation(self, name: str, x: Tensor) -> float:
        return weight_std(x)

    def rows(self, name: str, x: Tensor, most: int) -> slice:
        """Some of its rows, spread over the whole weight: about `most` values in all, where rows are not long."""
        return slice(None, None, max(1, x.numel() // most))

    def seed(self, name: str, number: int) -> int:
        """Of this process's part of the dither."""
        return number

    def inherits(self, name: str) -> bool:
        """Whether all of the weight has points of the checkpoint before."""
        return True

    def lattice(
        self, name: str, x: Tensor, known: Curvature, usual: float, seed: int, careful: float
    ) -> Lattice | None:
        """As `weights.lattice_of`."""
        return make_lattice(x, known, usual, seed, careful)

    # of all weights

    def global_tensors(self, state: FlatState) -> GlobalTensors:
        """The tensors of all ranks."""
        return GlobalTensors.from_state(state)

    def picks(self, flat: FlatState, reference: Reference | None, alive: Collection[str] | None) -> TensorSelection:
        """Which tensors are weights to be quantized; what comes first."""
        return select_tensors(
            flat,
            GlobalTensors.from_state(flat),
            alive,
            min_numel=MIN_LATTICE_NUMEL,
            min_dims=1,
            optimized_names=flat.optimizer_info.keys(),
        )

    def unmoved(
        self, names: Collection[str], flat: FlatState, reference: Reference | None
    ) -> dict[str, QuantizedTensor]:
        """As `unmoved.unmoved`, of tensors that have not moved anywhere; weights among them are no picks any more."""
        return unchanged_tensors(names, flat, reference, GlobalTensors.from_state(flat))

    def moments(
        self,
        flat: FlatState,
        save: int,
        seed: int,
        steps: MomentPrecision,
        made: dict[str, Tensor],
        kept: Collection[str] = (),
    ) -> Iterable[tuple[str, LatticeTensor]]:
        """As `moments.moments`."""
        return moments_to_lattices(flat, save, seed, steps, made, kept)

    def curvatures(
        self, weights: Mapping[str, Tensor], flat: FlatState, recorded: Mapping[str, Tensor]
    ) -> dict[str, Curvature]:
        """As `curvature.curvatures`."""
        return estimate_curvatures(weights, flat, recorded)

    def probe(self, weights: Mapping[str, Tensor], rise: MeasureLossIncrease) -> dict[str, float]:
        """As `probes.probe`."""
        return probe(weights, rise)

    def probed(self, weights: Mapping[str, Tensor], found: Mapping[str, float]) -> dict[str, Curvature]:
        """As `probes.probed`."""
        return curvatures_from_probe(weights, found)

    def usual(self, known: Mapping[str, Curvature], weights: Mapping[str, Tensor]) -> float:
        """As `weights.geometric_mean_curvature`."""
        return geometric_mean_curvature(known, weights)

    def count(self, weights: Collection[str]) -> int:
        """How many whole weights there are."""
        return len(weights)

    def total(self, *numbers: float) -> tuple[float, ...]:
        """Sums over all processes."""
        return numbers

    def largest(self, number: int | None) -> int | None:
        """Of all processes; None where none has one."""
        return number

    def agreed(self, thing: T) -> T | None:
        """What all processes have; None where they differ."""
        return thing

    def shares(self, counts: Mapping[str, tuple[int, int]]) -> dict[str, float]:
        """By title, how many of the values of each weight are counted.

        Args:
            counts: by name, so many of so many values.
        """
        return {name: some / max(1, every) for name, (some, every) in counts.items()}

    def anywhere(self, names: Iterable[str]) -> set[str]:
        """Titles of the weights that some process names."""
        return set(names)

    def bits(self, codes: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None) -> float:
        """What codes cost, by their entropy.

        Args:
            weights: of which the codes are only some; None: they are all.
        """
        if weights is None:
            return sum(entropy_bits(one) for one in codes.values())
        return sum(entropy_bits(one) * weights[name].numel() / max(1, one.numel()) for name, one in codes.items())


ALONE = Pool()
