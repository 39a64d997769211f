"""Published schemes that the library is compared with: QD+, CNR+, GOBO+ and ExCP."""

from shrinkpoint_lab.baselines.excp import ExCP
from shrinkpoint_lab.baselines.gobo import GOBO
from shrinkpoint_lab.baselines.uniform import CNR, QD

__all__ = ["CNR", "GOBO", "QD", "ExCP"]
