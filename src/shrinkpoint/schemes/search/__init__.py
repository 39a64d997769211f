"""Which point of a space: the smallest whose measured degradation is accepted. Knows nothing of tensors."""

from shrinkpoint.schemes.search.bound import branch_and_bound
from shrinkpoint.schemes.search.diagonal import diagonal
from shrinkpoint.schemes.search.neighbourhood import neighbourhood
from shrinkpoint.schemes.search.outcome import Outcome, Trial
from shrinkpoint.schemes.search.progress import Progress, show
from shrinkpoint.schemes.search.space import METRIC, Axis, Point, Space, dominated
from shrinkpoint.schemes.search.trials import Joint, Trials

__all__ = [
    "METRIC",
    "Axis",
    "Joint",
    "Outcome",
    "Point",
    "Progress",
    "Space",
    "Trial",
    "Trials",
    "branch_and_bound",
    "diagonal",
    "dominated",
    "neighbourhood",
    "show",
]  # fmt: skip
