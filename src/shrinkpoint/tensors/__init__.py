"""States as tensors: nests of tensors and plain values to a JSON tree and named tensors, and back.

`info` needs no torch: it is imported by what only lists, verifies or copies.
"""
