"""Settings of a boundary between two stages, real (`pipeline`) or in one process (`simulate`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.compressors.base import Compressor
from shrinkpoint.comm.compressors.sparse import SAME_INDICES_ADVICE, SameIndices
from shrinkpoint.comm.error_feedback import ErrorFeedback
from shrinkpoint.comm.link import CompressorLike
from shrinkpoint.comm.spec import as_compressor
from shrinkpoint.errors import PolicyError, warn_user


def parse_directions(
    where: str, boundary: int, compressors: Mapping[str, CompressorLike]
) -> dict[str, Compressor | ErrorFeedback | None]:
    """Parses the compressor or feedback of each direction of a boundary; None for no compression.

    Raises:
        PolicyError: an invalid spec, or one that needs indices which no message has.
    """
    parsed = {name: None if spec is None else as_compressor(spec) for name, spec in compressors.items()}
    plain = {name: one.compressor if isinstance(one, ErrorFeedback) else one for name, one in parsed.items()}
    has_indices = plain["forward"] is not None and type(plain["forward"]).indices is not Compressor.indices
    for name, compressor in plain.items():
        if isinstance(compressor, SameIndices) and (name == "forward" or not has_indices):
            found = f"{parsed[name]} for boundary {boundary}, whose forward direction has {parsed['forward']}"
            expected = "a gradient at the indices that a forward message carries"
            raise PolicyError(f"{where}, {name}", found=found, expected=expected, do=SAME_INDICES_ADVICE)
    return parsed


class CompressionSwitch:
    """A bool attribute, at first True. The first False warns if the model was trained with sparse activations.

    Its owner has an attribute `sparse_spec`, which is what `find_sparse_spec` returned.

    Args:
        condition: the start of the warning, such as "compression is off".
    """

    def __init__(self, condition: str) -> None:
        self._condition = condition

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self._where = f"_{name}", f"{owner.__name__}, {name}"

    def __get__(self, instance: object, owner: type | None = None) -> bool:
        return getattr(instance, self._name, True)

    def __set__(self, instance: Any, value: bool) -> None:
        setattr(instance, self._name, validate.check_bool(self._where, value))
        if not value and instance.sparse_spec is not None:
            spec, instance.sparse_spec = instance.sparse_spec, None
            text = (
                f"{self._condition} and this model was trained with {spec} on its activations. Such a model is usually "
                "much worse without (arXiv 2401.07788); train with feedback such as ef21 to prevent that"
            )
            warn_user(text)


def find_sparse_spec(compressors: Iterable[Compressor | ErrorFeedback | None]) -> str | None:
    """The spec of the first compressor that drops entries without feedback that makes up for it; None for none."""
    for feedback in compressors:
        compressor = feedback.compressor if isinstance(feedback, ErrorFeedback) else feedback
        is_stateless = not isinstance(feedback, ErrorFeedback) or feedback.is_stateless
        if compressor is not None and is_stateless and isinstance(getattr(compressor, "share", None), float):
            return compressor.spec
    return None


def check_ids(ids: Any) -> Tensor:
    """Returns sample ids as a tensor; raises PolicyError unless they are integers, 1-d."""
    expected, advice = "integers, 1-d: one for each row of the batch", "pass e.g. torch.arange(batch_size)"
    try:
        tensor: Tensor = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:  # a text, rows of unequal lengths, an integer beyond 64 bits
        raise validate.argument_error("set_sample_ids", ids, expected, advice) from error
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        problem = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise PolicyError("set_sample_ids", found=problem, expected=expected, do=advice)
    return tensor


def split_ids(ids: Tensor, micro_batches: int) -> tuple[Tensor, ...]:
    """Splits sample ids (integers, 1-d) into micro-batches as torch's schedules split a batch: int64, on the CPU."""
    return torch.tensor_split(ids.detach().to("cpu", torch.int64), micro_batches)
