"""HUGGING FACE'S TRAINER: its checkpoints as deltas, its resume bit for bit."""

from shrinkpoint.extras import missing

try:
    from shrinkpoint.train.transformers.callback import ShrinkCallback
    from shrinkpoint.train.transformers.folders import newest
    from shrinkpoint.train.transformers.settings import Shrink
    from shrinkpoint.train.transformers.trainer import ShrinkTrainer
except ModuleNotFoundError as error:
    raise missing(error, "transformers") from None

__all__ = ["Shrink", "ShrinkCallback", "ShrinkTrainer", "newest"]
