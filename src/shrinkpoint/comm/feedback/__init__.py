"""Error feedback: what the ends of a link remember of earlier messages, to make up for what these lost."""

from shrinkpoint.comm.feedback.aqsgd import AQSGD
from shrinkpoint.comm.feedback.base import ErrorFeedback
from shrinkpoint.comm.feedback.error_feedback import EF, EF21, EFMixed

__all__ = ["AQSGD", "EF", "EF21", "EFMixed", "ErrorFeedback"]
