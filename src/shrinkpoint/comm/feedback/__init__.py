"""What both ends of a link remember of earlier messages, so that a loss is made good later: one method a file."""

from shrinkpoint.comm.feedback.aqsgd import AQSGD
from shrinkpoint.comm.feedback.base import ErrorFeedback
from shrinkpoint.comm.feedback.error_feedback import EF, EF21, EFMixed

__all__ = ["AQSGD", "EF", "EF21", "EFMixed", "ErrorFeedback"]
