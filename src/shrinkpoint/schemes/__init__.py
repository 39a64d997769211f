"""WHICH RECIPE: a scheme decides for a whole state what is done to each tensor."""

from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.lossless import Lossless

__all__ = ["Lossless", "Scheme"]
