"""What a user's own function makes of the gradients of a bucket of DDP before they are compressed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError

BucketFunction = Callable[[Any], "torch.futures.Future[Any] | Tensor | None"]
"""Changes a `torch.distributed.GradBucket` in place and returns None, or returns its values or a future of them."""
_MIXED_PRECISION_HOOK = "_reducer_allreduce_and_upcast_hook"
"""The hook of torch's own that DistributedDataParallel registers for `mixed_precision`."""


def apply_before(function: BucketFunction, bucket: Any) -> None:
    """Replace the gradients of a bucket by what a function makes of them, and wait for it if that is a future.

    Raises:
        PolicyError: it returned something else, or a tensor of another shape.
    """
    result: Any = function(bucket)
    if isinstance(result, torch._C.Future):  # which torch.futures.Future and that of a collective are
        result = result.wait()
    if isinstance(result, list | tuple) and len(result) == 1:  # the future of a collective has a list
        result = result[0]
    if result is None:
        return
    buffer = bucket.buffer()
    if not isinstance(result, Tensor) or result.shape != buffer.shape:
        problem = f"a tensor of {result.numel()} values" if isinstance(result, Tensor) else validate.type_name(result)
        expected = f"None, or the {buffer.numel()} values of the bucket as a tensor or a future"
        advice = "change bucket.buffer() in place, or return a tensor like it"
        raise PolicyError("compress_ddp(before=...)", found=problem, expected=expected, do=advice)
    buffer.copy_(result)


def check_before(function: object) -> None:
    """Raise PolicyError if that is no function of a bucket."""
    if function is not None and not callable(function):
        advice = "write before=lambda bucket: bucket.buffer().mul_(.5), or partial(hook, state) of a hook of torch"
        raise validate.argument_error("compress_ddp, before", function, "a function of a bucket", advice)


def check_without_hook(model: DistributedDataParallel) -> None:
    """Raise PolicyError if the model has a communication hook: torch takes one, and does not give it back.

    So has one that torch itself adds: at once for `mixed_precision`, for optimizers in the backward pass at the first
    forward pass.
    """
    reduced_parameters = getattr(model, "_module_parameters", ())  # those that DDP looks at, too
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in reduced_parameters):
        problem, expected = "optimizers in the backward pass, which have a hook of DDP", "optimizers that a loop steps"
        advice = "leave out _apply_optimizer_in_backward, and step an optimizer after the backward pass"
        raise PolicyError("compress_ddp", found=problem, expected=expected, do=advice)
    data: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    name = data.get("comm_hook")
    if name == _MIXED_PRECISION_HOOK:
        advice = "leave out mixed_precision= of DistributedDataParallel, and use torch.autocast"
        raise PolicyError("compress_ddp", found="a model with mixed_precision", expected="one without", do=advice)
    if name:
        problem, expected = f"a model with the hook {name}", "one without a hook"
        advice = "compress a new DistributedDataParallel without it; what changes gradients before is before="
        raise PolicyError("compress_ddp", found=problem, expected=expected, do=advice)
