"""LIGHTNING: `Trainer(plugins=[ShrinkIO()])`, and what belongs to it. docs/lightning.md."""

from shrinkpoint.errors import missing_extra

try:
    from shrinkpoint.train.lightning.callback import ShrinkIOCallback
    from shrinkpoint.train.lightning.io import ShrinkIO
    from shrinkpoint.train.lightning.load import latest_valid, load_from_checkpoint
    from shrinkpoint.train.lightning.training_loss import Validation
except ModuleNotFoundError as error:
    raise missing_extra(error, "lightning") from None

__all__ = ["ShrinkIO", "ShrinkIOCallback", "Validation", "latest_valid", "load_from_checkpoint"]
