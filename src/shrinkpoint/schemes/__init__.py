"""WHICH RECIPE: a scheme decides for a whole state what is done to each tensor."""

from shrinkpoint.schemes.again import Again
from shrinkpoint.schemes.base import Kept, Scheme
from shrinkpoint.schemes.cnr import CNR
from shrinkpoint.schemes.gobo import GOBO
from shrinkpoint.schemes.inshrinkerator import Inshrinkerator
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.schemes.names import named
from shrinkpoint.schemes.qd import QD
from shrinkpoint.schemes.searched import Searched
from shrinkpoint.schemes.settled import Settled
from shrinkpoint.schemes.target import ModelTarget, modules_of

__all__ = [
    "CNR", "GOBO", "QD", "Again", "Inshrinkerator", "Kept", "Lossless", "ModelTarget", "Scheme", "Searched", "Settled",
    "modules_of", "named",
]  # fmt: skip
