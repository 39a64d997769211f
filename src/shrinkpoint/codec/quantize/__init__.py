"""One quantizer a file: how values become integers, and the only place where anything may be lost (law 2)."""

from shrinkpoint.codec.quantize.exact import bits_of, from_bits

__all__ = ["bits_of", "from_bits"]
