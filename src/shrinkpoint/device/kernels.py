"""All functions that start kernels: what `shrinkpoint.device.run_kernels` hands over. Importing it imports Triton."""

from __future__ import annotations

from shrinkpoint.device.block_float import decode_blocks, encode_blocks
from shrinkpoint.device.feedback import add_residuals, store_residuals, sum_rows
from shrinkpoint.device.hadamard import rotate, rotate_back
from shrinkpoint.device.indices import decode_bitmap, decode_fields, encode_indices
from shrinkpoint.device.lattices import decode_points, quantize_points, quantize_powers, sum_moments, sum_values
from shrinkpoint.device.normal_float import decode_normal, encode_normal
from shrinkpoint.device.rows import GroupWire
from shrinkpoint.device.uniform import UniformWire, decode_uniform, encode_uniform

__all__ = [
    "GroupWire",
    "UniformWire",
    "add_residuals",
    "decode_bitmap",
    "decode_blocks",
    "decode_fields",
    "decode_normal",
    "decode_points",
    "decode_uniform",
    "encode_blocks",
    "encode_indices",
    "encode_normal",
    "encode_uniform",
    "quantize_points",
    "quantize_powers",
    "rotate",
    "rotate_back",
    "store_residuals",
    "sum_moments",
    "sum_rows",
    "sum_values",
]
