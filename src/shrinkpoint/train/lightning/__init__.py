"""LIGHTNING: `Trainer(plugins=[ShrinkIO()])`, and what belongs to it. docs/lightning.md."""

from shrinkpoint.extras import missing

try:
    from shrinkpoint.train.lightning.callback import ShrinkCallback
    from shrinkpoint.train.lightning.io import ShrinkIO
    from shrinkpoint.train.lightning.loading import load_from_checkpoint, newest
    from shrinkpoint.train.lightning.validation import Validation
except ModuleNotFoundError as error:
    raise missing(error, "lightning") from None

__all__ = ["ShrinkCallback", "ShrinkIO", "Validation", "load_from_checkpoint", "newest"]
