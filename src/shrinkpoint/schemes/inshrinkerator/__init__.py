"""Inshrinkerator / DynaQuant (arXiv 2306.11800): prune, protect, quantize; a searched setting; deltas of codes."""

from shrinkpoint.schemes.inshrinkerator.scheme import Inshrinkerator

__all__ = ["Inshrinkerator"]
