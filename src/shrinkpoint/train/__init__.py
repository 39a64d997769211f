"""A TRAINING LOOP MEETS A STORE: when to save, what belongs to a state, how to go on from it.

Frameworks have rooms of their own, which import them: `dcp`, `transformers`, `accelerate`, `lightning`.
"""

from shrinkpoint.train.gradients import Gradients
from shrinkpoint.train.manager import Manager, Restored, RestoreReport
from shrinkpoint.train.trail import Loaded, Passed, Trail, first_whole

__all__ = ["Gradients", "Loaded", "Manager", "Passed", "RestoreReport", "Restored", "Trail", "first_whole"]
