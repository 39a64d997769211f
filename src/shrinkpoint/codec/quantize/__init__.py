"""One quantizer a file: how values become integers, and the only place where anything may be lost (law 2)."""

from shrinkpoint.codec.quantize.adaptive import adaptive, best_range
from shrinkpoint.codec.quantize.clusters import cluster, quantize, weights_of
from shrinkpoint.codec.quantize.exact import bits_of, from_bits
from shrinkpoint.codec.quantize.exponents import exponents
from shrinkpoint.codec.quantize.logarithmic import logarithmic
from shrinkpoint.codec.quantize.nearest import assign
from shrinkpoint.codec.quantize.outliers import centroids, is_outlier, outliers
from shrinkpoint.codec.quantize.uniform import entropy, uniform, variable_bins

__all__ = [
    "adaptive",
    "assign",
    "best_range",
    "bits_of",
    "centroids",
    "cluster",
    "entropy",
    "exponents",
    "from_bits",
    "is_outlier",
    "logarithmic",
    "outliers",
    "quantize",
    "uniform",
    "variable_bins",
    "weights_of",
]
