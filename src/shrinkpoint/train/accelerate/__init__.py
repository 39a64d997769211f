"""ACCELERATE: `save_state` and `load_state` with deltas and every scheme, in place of the Accelerator's own."""

from shrinkpoint.extras import missing

try:
    from shrinkpoint.train.accelerate.functions import gradients, load_state, save_state, wait
    from shrinkpoint.train.accelerate.shrink import Resumed, Shrink
except ModuleNotFoundError as error:
    raise missing(error, "accelerate") from None

__all__ = ["Resumed", "Shrink", "gradients", "load_state", "save_state", "wait"]
