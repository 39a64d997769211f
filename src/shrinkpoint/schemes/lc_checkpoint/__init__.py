"""The scheme "lc-checkpoint" (arXiv 2009.13003), and the schemes that its paper compares with: "scar" and "topn"."""

from shrinkpoint.schemes.lc_checkpoint.scheme import LCCheckpoint
from shrinkpoint.schemes.lc_checkpoint.sparse_update import SCAR, TOPN

__all__ = ["SCAR", "TOPN", "LCCheckpoint"]
