"""Compressors: what becomes of a tensor on the wire."""
