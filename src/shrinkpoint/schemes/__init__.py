"""WHICH RECIPE: a scheme decides for a whole state what is done to each tensor."""

from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.schemes.names import named

__all__ = ["Lossless", "Scheme", "named"]
