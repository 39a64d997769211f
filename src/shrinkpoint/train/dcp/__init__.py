"""torch.distributed.checkpoint: small checkpoints of many ranks, one line away. docs/dcp.md.

import torch.distributed.checkpoint as dcp
from shrinkpoint.train.dcp import Reader, Writer

dcp.save(state, storage_writer=Writer(f"runs/gpt/step-{step}"))
dcp.load(state, storage_reader=Reader(f"runs/gpt/step-{step}"))
"""

from shrinkpoint.train.dcp.chains import forget
from shrinkpoint.train.dcp.installed import install, uninstall
from shrinkpoint.train.dcp.newest import newest
from shrinkpoint.train.dcp.reader import Reader
from shrinkpoint.train.dcp.whole import load
from shrinkpoint.train.dcp.writer import Writer

__all__ = ["Reader", "Writer", "forget", "install", "load", "newest", "uninstall"]
