"""Converts states, nests of tensors and plain values, to a JSON tree with named tensors, and back.

`info` does not import torch, so listing, verifying and copying checkpoints do not need it.
"""
