"""Storage reader and writer for torch.distributed.checkpoint: compressed checkpoints of many ranks. See docs/dcp.md.

import torch.distributed.checkpoint as dcp
from shrinkpoint.train.dcp import Reader, Writer

dcp.save(state, storage_writer=Writer(f"runs/gpt/step-{step}"))
dcp.load(state, storage_reader=Reader(f"runs/gpt/step-{step}"))
"""

from shrinkpoint.train.dcp.chain_registry import reset_chains
from shrinkpoint.train.dcp.directory import latest_valid
from shrinkpoint.train.dcp.manager import Manager
from shrinkpoint.train.dcp.reader import Reader, load
from shrinkpoint.train.dcp.writer import Writer

__all__ = ["Manager", "Reader", "Writer", "latest_valid", "load", "reset_chains"]
