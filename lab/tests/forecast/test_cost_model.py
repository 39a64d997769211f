"""A step is predicted from what messages cost, and what is smaller wins only where it makes the step faster."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.errors import PolicyError
from shrinkpoint_lab.forecast.recommendation import NO_COMPRESSION, rank_candidates
from shrinkpoint_lab.forecast.step_model import CandidateCost, MessageCost, Workload

MB = 1_000_000


def both(
    name: str, ratio: float, *, encode: float = 0.001, decode: float = 0.001, error: float = 0.01
) -> CandidateCost:
    """Messages of 4 MB, each way."""
    cost = MessageCost(4 * MB, round(4 * MB / ratio), encode, decode, error)
    return CandidateCost(name, cost, cost)


CAREFUL, BOLD = both("q8:64", 3.76), both("q4:64", 7.11, error=0.08)
PLAIN = (4 * MB, 4 * MB)


def test_the_measured_pipeline_at_10_mbit_is_predicted_within_5_percent() -> None:
    # 16 steps of 4 micro-batches of 262144 bytes each way over a loopback whose directions share the rate; seconds of
    # none, bf16, q8:64 and q4:64 (research notes, c.2): one after the other, as with GPipe
    for ratio, measured in ((1, 26.8), (2, 13.4), (3.76, 7.07), (7.11, 3.72)):
        load = Workload("pipeline", 10, micro_batches=4, schedule="GPipe")
        cost = MessageCost(262144, round(262144 / ratio))
        assert 16 * load.step_seconds(CandidateCost("x", cost, cost)) == pytest.approx(measured, rel=0.05)


def test_a_step_waits_for_computing_and_sending_or_for_the_slower_one() -> None:
    candidate = both("x", 4, encode=0.01, decode=0.02)  # 10 ms a message at 800 Mbit/s
    load = Workload("pipeline", 800, compute=0.2)
    assert load.step_seconds(candidate) == pytest.approx(0.2 + 0.06 + 0.02)
    assert load.uncompressed_seconds(*PLAIN) == pytest.approx(0.2 + 0.08)
    overlapped = replace(load, overlap=True)
    assert overlapped.step_seconds(candidate) == pytest.approx(0.26)
    assert overlapped.uncompressed_seconds(*PLAIN) == pytest.approx(0.2)
    assert replace(overlapped, mbps=80).uncompressed_seconds(*PLAIN) == pytest.approx(0.8)


def test_micro_batches_follow_each_other_at_the_interval_of_an_exchange() -> None:
    load = Workload("pipeline", 8, micro_batches=5)  # a megabyte a second
    assert load.transfer_seconds(2 * MB, 3 * MB) == pytest.approx(5 * (2 + 3))
    assert replace(load, duplex=True).transfer_seconds(2 * MB, 3 * MB) == pytest.approx(2 + 3 + 4 * 3)
    assert replace(load, schedule="GPipe", duplex=True).transfer_seconds(2 * MB, 3 * MB) == pytest.approx(5 * (2 + 3))


def test_gpipe_sends_what_is_encoded_beside_the_computing_of_the_next_micro_batch() -> None:
    load = Workload(
        "pipeline", 8, compute=9.0, micro_batches=5, schedule="GPipe"
    )  # a stage: 0.5 s forward, 1 s backward
    candidate = CandidateCost("x", MessageCost(4 * MB, 2 * MB), MessageCost(4 * MB, round(0.7 * MB)))
    assert load.step_seconds(candidate) == pytest.approx(9 + (5 * 2 - 4 * 0.5) + 0.7)
    assert load.uncompressed_seconds(4 * MB, 4 * MB) == pytest.approx(9 + 5 * 8)
    assert replace(load, overlap=True).step_seconds(candidate) == pytest.approx(5 * 2.7)


def test_what_is_encoded_crosses_in_both_directions_at_the_same_time() -> None:
    load = Workload("pipeline", 8, micro_batches=5)
    candidate = CandidateCost("x", MessageCost(4 * MB, 2 * MB), MessageCost(4 * MB, 3 * MB))
    assert load.step_seconds(candidate) == pytest.approx(2 + 3 + 4 * 3)
    assert load.uncompressed_seconds(2 * MB, 3 * MB) == pytest.approx(5 * (2 + 3))
    assert replace(load, duplex=True).uncompressed_seconds(2 * MB, 3 * MB) == pytest.approx(2 + 3 + 4 * 3)


def test_four_stages_at_100_mbit_were_measured_within_10_percent_of_the_forecast() -> None:
    # benchmarks/link.py, 1F1B over gloo, 8 micro-batches of 4 MiB by the compressor "exact", whose receives are posted
    # before and after the sends of an exchange; about half a second of computing
    load = Workload("pipeline", 100 * 1448 / 1514, compute=0.5, world_size=4, micro_batches=8)
    message = MessageCost(1 << 22, 1 << 22)
    assert load.step_seconds(CandidateCost("exact", message, message)) == pytest.approx(8.3, rel=0.1)
    assert load.uncompressed_seconds(1 << 22, 1 << 22) == pytest.approx(12.5, rel=0.1)


def test_a_middle_stage_exchanges_twice_and_the_first_micro_batch_goes_all_the_way() -> None:
    load = Workload("pipeline", 8, world_size=4, micro_batches=5)
    assert load.transfer_seconds(2 * MB, 3 * MB) == pytest.approx(3 * (2 + 3) + 4 * 2 * (2 + 3))
    assert replace(load, duplex=True).transfer_seconds(2 * MB, 3 * MB) == pytest.approx(3 * (2 + 3) + 4 * 2 * 3)
    assert replace(load, schedule="GPipe").transfer_seconds(2 * MB, 3 * MB) == pytest.approx(3 * (2 + 3) + 4 * (2 + 3))


def test_four_stages_at_10_mbit_were_measured_within_10_percent_of_the_forecast() -> None:
    # benchmarks/link.py, 1F1B over gloo, 4 micro-batches of a mebibyte, nothing encoded; little to compute
    assert Workload("pipeline", 10, world_size=4, micro_batches=4).transfer_seconds(1 << 20, 1 << 20) == pytest.approx(
        15.04, rel=0.1
    )
    assert Workload("pipeline", 10, micro_batches=4).transfer_seconds(1 << 20, 1 << 20) == pytest.approx(6.54, rel=0.1)


def test_averaging_carries_two_hops_without_the_own_shard() -> None:
    assert Workload("ddp", 1, world_size=2).nbytes(8 * MB, 8 * MB) == 8 * MB
    assert Workload("ddp", 1, world_size=4).nbytes(8 * MB, 8 * MB) == 12 * MB


def test_more_than_a_connection_may_have_on_their_way_waits_for_acknowledgements() -> None:
    cost = both("x", 4, encode=0, decode=0)
    load = Workload("ddp", 80, latency=0.1, segments=1000)  # 10 MB a second; of 1 MB a rank sends 1 MB in two hops
    rest = load.step_seconds(cost)
    assert replace(load, window=MB).step_seconds(cost) == rest
    # half a window is sent at once; for each further one the link is idle for 0.2 s but for the 0.05 s that it takes
    assert replace(load, window=MB / 2).step_seconds(cost) == pytest.approx(rest + 0.2 - 0.05)
    assert replace(load, window=MB / 4).step_seconds(cost) == pytest.approx(rest + 3 * (0.2 - 0.025))
    assert replace(load, latency=0.02, window=MB / 2).step_seconds(cost) == replace(load, latency=0.02).step_seconds(
        cost
    )
    wide = replace(load, world_size=5)  # more bytes, over four connections
    assert replace(wide, window=0.4 * MB).step_seconds(cost) == wide.step_seconds(cost)
    hook = replace(cost, transport="all-reduce")  # torch's ring
    assert replace(load, window=MB / 4).step_seconds(hook) == load.step_seconds(hook)


def test_gradients_are_sent_beside_computing_but_for_the_first_and_the_last_part() -> None:
    free = both("x", 4, encode=0, decode=0)
    load = Workload("ddp", 80, compute=0.5)  # 0.4 s for 4 MB
    assert load.uncompressed_seconds(*PLAIN) == pytest.approx(0.5 + 0.4)
    assert load.step_seconds(free) == pytest.approx(0.5 + 0.1)
    split = replace(load, buckets=4, segments=10)
    assert split.uncompressed_seconds(*PLAIN) == pytest.approx(0.625 * 0.5 + 0.4)
    assert split.step_seconds(free) == pytest.approx(0.5)  # 0.55 * 0.5 + 0.1 is less
    assert replace(split, mbps=20).step_seconds(free) == pytest.approx(0.55 * 0.5 + 0.4)
    costly = both("x", 4, encode=0.2, decode=0.2)
    assert split.step_seconds(costly) == pytest.approx(0.5 + 0.2 + 0.2)


def test_latency_is_waited_for_by_each_bucket_of_torch_and_by_two_hops_of_ours() -> None:
    load = Workload("ddp", 80, latency=0.02, buckets=2, segments=10)
    # a hop of a megabyte in all takes 0.05 s: the second hop of the first segment waits for the others
    assert load.latency_seconds(MB, is_encoded=True) == pytest.approx(2 * 0.02)
    assert replace(load, latency=0.05).latency_seconds(MB, is_encoded=True) == pytest.approx(
        2 * 0.05 + 0.05 - 0.9 * 0.05
    )
    assert replace(load, segments=1).latency_seconds(MB, is_encoded=True) == pytest.approx(3 * 0.02)
    assert load.latency_seconds(PLAIN[0]) == pytest.approx(2 * 2 * 0.02)
    assert load.latency_seconds(4 * PLAIN[0]) == pytest.approx(2 * 4 * 0.02)  # 4 MB of each rank in a bucket
    assert replace(load, world_size=3).latency_seconds(PLAIN[0]) == pytest.approx(2 * 2 * 2 * 0.02)
    free = both("x", 4, encode=0, decode=0)
    assert load.step_seconds(free) == pytest.approx(0.1 + 0.04)
    assert load.uncompressed_seconds(*PLAIN) == pytest.approx(0.4 + 0.08)


def test_torchs_own_hook_waits_as_torchs_buckets_do_with_half_the_bytes() -> None:
    load = Workload("ddp", 80, compute=0.5, latency=0.02, buckets=4, segments=10)
    cost = MessageCost(4 * MB, 2 * MB, encode=0.01, decode=0.03)
    hook = CandidateCost("hook", cost, cost, transport="all-reduce")
    assert load.codec_seconds(hook) == pytest.approx(0.04)
    assert load.step_seconds(hook) == pytest.approx(0.54 * (1 + 1 / 4) / 2 + 0.2 + 4 * 2 * 0.02)
    without_casts = replace(hook, forward=MessageCost(4 * MB, 2 * MB))
    assert load.step_seconds(without_casts) == pytest.approx(load.uncompressed_seconds(2 * MB, 2 * MB))


def test_factors_are_exchanged_twice() -> None:
    load = Workload("ddp", 80, latency=0.05, segments=10)
    once = both("x", 4, encode=0, decode=0)
    twice = replace(once, transport="factors")
    # half of the bytes are right factors: a hop of each exchange takes 0.025 s
    latency = 2 * (2 * 0.05 + 0.05 - 0.9 * 0.025)
    assert load.step_seconds(twice) == pytest.approx(0.1 + latency)
    assert load.step_seconds(once) == pytest.approx(0.1 + load.latency_seconds(MB, is_encoded=True))


def test_bytes_that_are_not_sent_save_the_processor_time_of_sending_them() -> None:
    load = Workload("ddp", 1e6, compute=0.1, all_reduce_seconds=1e-8)  # 4 MB of two hops: 0.04 s
    free = both("x", 4, encode=0, decode=0)
    assert load.uncompressed_seconds(*PLAIN) == pytest.approx(0.1, rel=0.01)
    assert load.step_seconds(free) == pytest.approx(0.1 - 0.03, rel=0.01)
    assert replace(load, all_reduce_seconds=1).step_seconds(free) == pytest.approx(0, abs=1e-3)
    assert replace(load, parallelism="pipeline").step_seconds(free) == pytest.approx(0.1, rel=0.01)


def test_a_fast_link_asks_for_torchs_own_hook_where_sending_takes_the_processor() -> None:
    # two replicas of 16.8 MB at 10 Gbit/s; seconds of casts and of sending as on the machine of link_latency.json
    cost = MessageCost(16_800_000, 8_400_000, encode=0.003, decode=0.003, error=0.002)
    hook = CandidateCost("torch bf16 hook", cost, cost, transport="all-reduce")
    slow = CandidateCost("q4:64", *(MessageCost(16_800_000, 2_400_000, encode=0.01, decode=0.01),) * 2)
    load = Workload("ddp", 9600, compute=0.054, buckets=4, segments=5, all_reduce_seconds=1.2e-9)
    advice = rank_candidates(load, [hook, slow], uncompressed=(16_800_000, 16_800_000))
    assert advice.best == "torch bf16 hook"


def test_micro_batches_wait_for_latency_at_each_boundary_and_then_share_the_wait() -> None:
    load = Workload("pipeline", 8, latency=0.1, world_size=4, micro_batches=5)
    assert load.latency_seconds(0) == pytest.approx(6 * (1 + 4 / 4) * 0.1)
    assert replace(load, schedule="GPipe").latency_seconds(0) == pytest.approx(6 * 0.1)
    candidate = both("x", 4, encode=0, decode=0)
    without = replace(load, latency=0.0).step_seconds(candidate)
    assert load.step_seconds(candidate) == pytest.approx(without + 1.2)


def test_a_rank_encodes_and_decodes_what_its_index_asks_for() -> None:
    candidate = CandidateCost("x", MessageCost(8, 4, encode=1, decode=2), MessageCost(8, 4, encode=4, decode=8))
    assert Workload("pipeline", 1).codec_seconds(candidate) == 15  # one after another
    # then at the interval of the busier stage: the first one encodes 1 and decodes 8, the last one 2 and 4
    assert Workload("pipeline", 1, micro_batches=3).codec_seconds(candidate) == 15 + 2 * 9
    assert Workload("pipeline", 1, world_size=3, micro_batches=3).codec_seconds(candidate) == 2 * 15 + 2 * 15
    assert Workload("ddp", 1, world_size=2).codec_seconds(candidate) == 1 + 2  # of a whole step


def test_the_break_even_is_the_rate_at_which_a_message_takes_as_long_either_way() -> None:
    candidate = both("x", 4, encode=0.002, decode=0.004)
    rate = Workload("pipeline", 1).break_even(candidate)
    enc, dec = 4 * MB / 0.002, 4 * MB / 0.004
    assert rate == pytest.approx(8e-6 * (1 - 1 / 4) / (1 / enc + 1 / dec))
    encoded = 0.006 + 8 * candidate.forward.wire / (rate * 1e6)
    assert encoded == pytest.approx(8 * candidate.forward.raw / (rate * 1e6))


@given(st.floats(1.01, 100), st.floats(1e-6, 1), st.integers(2, 9))
def test_below_its_break_even_a_candidate_is_faster_and_above_it_slower(
    ratio: float, seconds: float, world: int
) -> None:
    candidate = both("x", ratio, encode=seconds, decode=seconds / 3)
    load = Workload("pipeline", 1, world_size=world)
    rate = load.break_even(candidate)
    slower, faster = replace(load, mbps=rate * 0.99), replace(load, mbps=rate * 1.01)
    assert slower.step_seconds(candidate) < slower.uncompressed_seconds(*PLAIN)
    assert faster.step_seconds(candidate) > faster.uncompressed_seconds(*PLAIN)


@given(st.floats(1.01, 100), st.floats(1e-6, 1), st.integers(2, 9))
def test_the_same_of_gradients_that_are_averaged(ratio: float, seconds: float, world: int) -> None:
    candidate = both("x", ratio, encode=seconds, decode=seconds / 3)
    rate = Workload("ddp", 1, world_size=world).break_even(candidate)
    slower, faster = (Workload("ddp", rate * part, world_size=world) for part in (0.99, 1.01))
    assert slower.step_seconds(candidate) < slower.uncompressed_seconds(*PLAIN)
    assert faster.step_seconds(candidate) > faster.uncompressed_seconds(*PLAIN)


def test_what_saves_nothing_breaks_even_nowhere_and_what_costs_nothing_everywhere() -> None:
    load = Workload("pipeline", 1)
    assert load.break_even(both("x", 1)) == 0
    assert load.break_even(both("x", 0.9)) == 0
    assert load.break_even(both("x", 2, encode=0, decode=0)) == math.inf


def test_off_is_the_advice_where_computing_hides_the_wire() -> None:
    advice = rank_candidates(Workload("pipeline", 1000, compute=1, overlap=True), [CAREFUL, BOLD], uncompressed=PLAIN)
    assert advice.best == NO_COMPRESSION
    assert not advice.pays
    assert "best: off" in str(advice)


def test_off_is_the_advice_where_encoding_takes_longer_than_sending() -> None:
    slow = both("slow", 8, encode=1, decode=1)
    for overlap in (True, False):
        load = Workload("pipeline", 1000, compute=0.01, overlap=overlap)
        assert rank_candidates(load, [slow], uncompressed=PLAIN).best == NO_COMPRESSION


def test_the_smaller_one_wins_where_the_wire_is_what_takes_time() -> None:
    advice = rank_candidates(Workload("pipeline", 100), [CAREFUL, BOLD], uncompressed=PLAIN)
    assert advice.best == "q4:64"
    assert advice.estimates[0].name == "q4:64"
    assert advice.estimates[-1].name == NO_COMPRESSION
    assert advice.estimate("q4:64").gain == pytest.approx(7.11, rel=0.1)


def test_a_lossier_one_never_wins_by_being_smaller_alone() -> None:
    load = Workload("pipeline", 1000, compute=0.05, overlap=True)  # computing hides the careful one already
    advice = rank_candidates(load, [CAREFUL, BOLD], uncompressed=PLAIN)
    assert advice.best == "q8:64"
    assert advice.estimate("q4:64").nbytes < advice.estimate("q8:64").nbytes


def test_a_gain_below_5_percent_is_none() -> None:
    assert rank_candidates(Workload("pipeline", 100), [both("x", 1.04)], uncompressed=PLAIN).best == NO_COMPRESSION
    assert rank_candidates(Workload("pipeline", 100), [both("x", 1.06)], uncompressed=PLAIN).best == "x"


def test_what_loses_too_much_is_listed_and_not_chosen() -> None:
    load = Workload("pipeline", 100)
    advice = rank_candidates(load, [CAREFUL, BOLD], uncompressed=PLAIN, max_error=0.05)
    assert advice.best == "q8:64"
    assert advice.estimate("q4:64").seconds < advice.estimate("q8:64").seconds
    broken = CandidateCost("broken", BOLD.forward, replace(BOLD.backward, error=math.nan))
    assert rank_candidates(load, [broken], uncompressed=PLAIN, max_error=0.05).best == NO_COMPRESSION


def test_the_table_is_aligned_and_names_every_candidate() -> None:
    advice = rank_candidates(
        Workload("ddp", 100, world_size=4), [CAREFUL, BOLD], uncompressed=PLAIN, description="1000000 fp32"
    )
    lines = advice.table().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert {line.split()[0] for line in lines[1:]} == {NO_COMPRESSION, "q8:64", "q4:64"}
    assert str(advice).startswith("1000000 fp32, ddp, 4 ranks, 100 Mbit/s")
    assert "best: q4:64" in str(advice)


def test_an_empty_tensor_needs_no_compressor() -> None:
    nothing = CandidateCost("q4:64", MessageCost(0, 0), MessageCost(0, 0))
    assert rank_candidates(Workload("pipeline", 100), [nothing], uncompressed=(0, 0)).best == NO_COMPRESSION


@pytest.mark.parametrize(
    "wrong",
    [
        {"mbps": 0.0},
        {"mbps": math.nan},
        {"compute": -1.0},
        {"world_size": 1},
        {"micro_batches": 0},
        {"parallelism": "x"},
        {"schedule": "x"},
        {"all_reduce_seconds": -1.0},
    ],
)
def test_an_invalid_workload_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(PolicyError):
        Workload(**{"parallelism": "pipeline", "mbps": 100.0, **wrong})  # type: ignore[arg-type]
