"""WHICH RECIPE: a scheme decides for a whole state what is done to each tensor."""

from shrinkpoint.schemes.again import Again
from shrinkpoint.schemes.base import Kept, Resuming, Scheme, Settling
from shrinkpoint.schemes.cnr import CNR
from shrinkpoint.schemes.excp import ExCP
from shrinkpoint.schemes.fisher import Fisher
from shrinkpoint.schemes.gobo import GOBO
from shrinkpoint.schemes.inshrinkerator import Inshrinkerator
from shrinkpoint.schemes.lc_checkpoint import LCCheckpoint
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.schemes.names import maker, named
from shrinkpoint.schemes.partial import SCAR, TOPN
from shrinkpoint.schemes.qd import QD
from shrinkpoint.schemes.searched import Searched
from shrinkpoint.schemes.settled import Settled
from shrinkpoint.schemes.target import ModelTarget, modules_of

__all__ = [
    "CNR", "GOBO", "QD", "SCAR", "TOPN", "Again", "ExCP", "Fisher", "Inshrinkerator", "Kept", "LCCheckpoint",
    "Lossless", "ModelTarget", "Resuming", "Scheme", "Searched", "Settled", "Settling", "maker", "modules_of", "named",
]  # fmt: skip
