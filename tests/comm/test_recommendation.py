from __future__ import annotations

from pathlib import Path

import pytest
from helpers.processes import ranks
from torch import nn

from shrinkpoint.comm import recommend
from shrinkpoint.comm.recommendation import Measurement, choose
from shrinkpoint.errors import PolicyError

RANKS = """
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from helpers.replica_search import join, leave
    from shrinkpoint.comm import compress_ddp, recommend

    NAMES = ["torch bf16 hook", "bf16", "q8:64", "q4:64", "ef(top10)", "lowrank4(q8:64)"]

    def of_rank(rank, width, folder):
        said = join(rank, width, folder)
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
        noise = recommend(model, ["q8:64"], seconds=0.01)
        said["noise"] = [row.error for row in noise.measurements if row.name == "q8:64"]
        torch.manual_seed(rank)
        with model.no_sync():
            model(torch.randn(32, 64)).square().mean().backward()
        before = [p.grad.clone() for p in model.parameters()]
        advice = recommend(model, NAMES, seconds=0.01)
        said["rows"] = {row.name: [row.seconds, row.nbytes, row.error] for row in advice.measurements}
        said["best"], said["table"] = advice.best, str(advice)
        said["exact"] = recommend(model, ["q8:64"], max_error=0, seconds=0.01).best
        said["kept"] = all(torch.equal(p.grad, x) for p, x in zip(model.parameters(), before))
        compress_ddp(model, "q8:64")
        model.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        said["trains"] = all(bool(p.grad.isfinite().all()) for p in model.parameters())
        leave(said, rank, folder)
"""


def test_candidates_are_measured_on_the_group_of_the_model(tmp_path: Path):
    first, second = ranks(RANKS, 2, tmp_path)
    assert (first["rows"], first["best"]) == (second["rows"], second["best"])
    rows = first["rows"]
    assert rows["off"][2] == 0 < rows["q8:64"][2] < rows["q4:64"][2] < 0.2
    assert rows["torch bf16 hook"][2] < 0.01
    assert rows["torch bf16 hook"][1] * 2 == rows["off"][1] > 3.5 * rows["q8:64"][1] > 6 * rows["q4:64"][1]
    assert all(seconds > 0 for seconds, _, _ in rows.values())
    assert first["table"].splitlines()[-1] == f"best: {first['best']}"
    assert first["exact"] == "off" and first["kept"] and first["trains"]
    assert 0 < first["noise"][0] < 0.02


def test_choose_prefers_accurate_candidates():
    rows = [Measurement("off", 1.0, 4, 0.0), Measurement("q8", 0.5, 2, 0.01), Measurement("q4", 0.48, 1, 0.1)]
    assert choose(rows, None) == "q8"  # 4% is less than measurements differ by
    faster = [*rows, Measurement("q2", 0.3, 1, 0.4)]
    assert choose(faster, None) == "q2"
    assert choose(faster, 0.2) == "q8"
    assert choose(faster, 0.0) == "off"
    assert choose([rows[0], Measurement("q8", 0.97, 2, 0.01)], None) == "off"


def test_another_kind_of_model_is_refused():
    with pytest.raises(PolicyError, match="DistributedDataParallel"):
        recommend(nn.Linear(2, 2))  # type: ignore[arg-type]
