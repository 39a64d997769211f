"""Weights that a trainer publishes, and other processes follow in place."""

from __future__ import annotations

from shrinkpoint.sync.publisher import Publisher, PublishReport
from shrinkpoint.sync.subscriber import Subscriber, Update

__all__ = ["PublishReport", "Publisher", "Subscriber", "Update"]
