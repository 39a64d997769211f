"""The scheme "inshrinkerator" (arXiv 2306.11800): prune, protect and quantize with searched settings."""
