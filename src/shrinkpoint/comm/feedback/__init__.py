"""What both ends of a link remember of earlier messages, so that a loss is made good later: one method a file."""

from shrinkpoint.comm.feedback.aqsgd import AQSGD
from shrinkpoint.comm.feedback.base import Feedback
from shrinkpoint.comm.feedback.ef import EF
from shrinkpoint.comm.feedback.ef21 import EF21
from shrinkpoint.comm.feedback.mixed import EFMixed

__all__ = ["AQSGD", "EF", "EF21", "EFMixed", "Feedback"]
