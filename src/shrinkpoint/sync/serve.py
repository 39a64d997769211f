"""The call that a trainer makes after it has published: a server reads while it generates, and then writes."""

from __future__ import annotations

import time
from typing import Any, Protocol

from shrinkpoint.sync.publisher import PublishReport


class WeightSyncClient(Protocol):
    """Three methods of vLLM's `VLLMWeightSyncClient`."""

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def update_server(client: WeightSyncClient, report: PublishReport) -> None:
    """Bring a server to a version that was just published.

    The server reads for as long as publishing took, and generates meanwhile. Then it writes, which pauses it.

    Args:
        client: client of the server, such as vLLM's `HTTPVLLMWeightSyncClient(url)`.
        report: what `Publisher.publish` returned.
    """
    client.start_weight_update()
    time.sleep(report.seconds)
    client.update_weights({"version": report.version})
    client.finish_weight_update(str(report.version))
