"""A TRAINING LOOP MEETS A STORE: when to save, what belongs to a state, how to go on from it."""

from shrinkpoint.train.gradients import Gradients
from shrinkpoint.train.manager import Manager, Restored, RestoreReport

__all__ = ["Gradients", "Manager", "RestoreReport", "Restored"]
