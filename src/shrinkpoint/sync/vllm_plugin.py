"""vLLM's plugin: every process of a server knows the backend "shrinkpoint"."""

from __future__ import annotations

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory


def register() -> None:
    """Register the engine, which is imported when a server asks for it; vLLM calls this in each process."""
    if "shrinkpoint" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("shrinkpoint", "shrinkpoint.sync.vllm", "ShrinkpointEngine")
