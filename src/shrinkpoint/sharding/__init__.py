"""Tensors that are sharded over ranks: which rank holds what, collectives, and statistics of global tensors."""
