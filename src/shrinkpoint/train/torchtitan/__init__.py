"""TORCHTITAN: `checkpoint=TitanCheckpointManager.Config(enable=True)` in a configuration. docs/torchtitan.md."""

from shrinkpoint.errors import missing_extra

try:
    from shrinkpoint.train.torchtitan.manager import TitanCheckpointManager
except ModuleNotFoundError as error:
    raise missing_extra(error, "torchtitan") from None

__all__ = ["TitanCheckpointManager"]
