"""ACCELERATE: `save_state` and `load_state` with deltas and every scheme, in place of the Accelerator's own."""

from shrinkpoint.errors import missing_extra

try:
    from shrinkpoint.train.accelerate.accelerator_checkpointer import (
        AcceleratorCheckpointer,
        load_state,
        record_gradients,
        save_state,
        wait,
    )
    from shrinkpoint.train.restore_result import RestoreResult
except ModuleNotFoundError as error:
    raise missing_extra(error, "accelerate") from None

__all__ = ["AcceleratorCheckpointer", "RestoreResult", "load_state", "record_gradients", "save_state", "wait"]
