"""A training loop's state: nested containers of tensors and plain values <-> a JSON tree and named tensors."""

from shrinkpoint.state.dtypes import dtype_name, empty, torch_dtype
from shrinkpoint.state.flat import AdamFacts, FlatState
from shrinkpoint.state.flatten import flatten, unflatten
from shrinkpoint.state.snapshot import snapshot

__all__ = ["AdamFacts", "FlatState", "dtype_name", "empty", "flatten", "snapshot", "torch_dtype", "unflatten"]
