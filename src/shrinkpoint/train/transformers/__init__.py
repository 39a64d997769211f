"""HUGGING FACE'S TRAINER: its checkpoints as deltas, its resume bit for bit."""

from shrinkpoint.errors import missing_extra

try:
    from shrinkpoint.train.transformers.callback import SavePolicyCallback, ShrinkCallback
    from shrinkpoint.train.transformers.checkpoint_dirs import latest_valid
    from shrinkpoint.train.transformers.config import ShrinkConfig
    from shrinkpoint.train.transformers.pretrained import export_pretrained, from_pretrained
    from shrinkpoint.train.transformers.trainer import ShrinkTrainer
except ModuleNotFoundError as error:
    raise missing_extra(error, "transformers") from None

__all__ = [
    "SavePolicyCallback",
    "ShrinkCallback",
    "ShrinkConfig",
    "ShrinkTrainer",
    "export_pretrained",
    "from_pretrained",
    "latest_valid",
]
