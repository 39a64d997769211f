"""The scheme "inshrinkerator" (arXiv 2306.11800): prune, protect and quantize with searched settings."""

from shrinkpoint.schemes.inshrinkerator.scheme import Inshrinkerator

__all__ = ["Inshrinkerator"]
