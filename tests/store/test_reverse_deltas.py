"""Older checkpoints of an ended chain become deltas against newer ones, so that retention holds no base for them."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from helpers.faulty_storage import FaultyStorage
from helpers.stores import PLACES_AND_BUCKET, Linkless, place
from helpers.strategies import difference
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.errors import ShrinkpointError, VersionError
from shrinkpoint.schemes import lossless
from shrinkpoint.schemes.encode import records
from shrinkpoint.storage import LocalStorage, MemoryStorage, Storage
from shrinkpoint.store import Keep, Store, rewrite
from shrinkpoint.store import manifest as manifests
from shrinkpoint.store.chain import file_sizes
from shrinkpoint.store.chain_limit import DISK_TOLERANCE, ChainBytes, ChainLimit, FileSizes, choose_spacing
from shrinkpoint.store.retention import ReversedShares


def near(step: int) -> dict[str, Any]:
    """A state of 32 kB, of which little differs from that of another step."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 4096, generator=generator)
    generator.manual_seed(step + 1)
    weights[0, :400] += torch.randn(400, generator=generator)
    return {"model": {"a": weights[0].clone(), "b": weights[1].clone()}, "step": step}


def save_next(store: Store, keep: Keep, step: int) -> None:
    """Save as a manager does."""
    store.chain_limit.keep = keep
    store.save(step, near(step), metrics={"val_loss": float(step % 5)})
    store.prune(keep, dry_run=False, defer=True)


def assert_loads(store: Store) -> None:
    """Everything that is listed loads bit for bit, through the store and by the names that files have of each other."""
    for step in store.steps():
        assert difference(store.load(step, keep=False), near(step)) is None
        if isinstance(store.storage, LocalStorage):
            path = store.storage.path / store.manifest(step).key(store.manifest(step).payloads[0].name)
            assert difference(sp.load(path), near(step)) is None
    assert all(finding.loads for finding in store.verify(deep=True))


@pytest.fixture(params=PLACES_AND_BUCKET)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return place(request.param, tmp_path / "store")


@pytest.mark.parametrize("last", [2, 3, 5])
def test_what_is_kept_needs_one_keyframe(storage: Storage, last: int) -> None:
    with Store(storage, threads=1) as store:
        held = []
        for step in range(3 * last + 4):
            save_next(store, Keep(last=last), step)
            assert_loads(store)
            keyframes = [manifest for manifest in store.list() if not manifest.bases]
            assert len(keyframes) <= 1 + (step == last)
            held.append(sum(file_sizes(store.list()).values()))
        assert {link.digest for one in store.list() for link in one.bases} & {one.digest for one in store.list()}
    assert max(held) < 2 * held[0]  # two chains would hold more


def test_values_in_memory_are_not_decoded_and_codes_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, encode = [], records.encode_lattice_record
    model = torch.nn.Linear(64, 128)
    optimizer = torch.optim.Adam(model.parameters())

    def train() -> None:
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()

    def spy(record: Any, **options: Any) -> Any:
        compared.extend(record.tensors)
        return encode(record, **options)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the newest checkpoint is decoded, or codes are compared with values")

    monkeypatch.setattr(records, "encode_lattice_record", spy)
    monkeypatch.setattr(rewrite, "decode_chain", refuse)
    monkeypatch.setattr(lossless, "tensor_bytes", refuse)
    scheme, states = sp.Fisher(relative_error=0.3), dict[int, Any]()
    with sp.CheckpointManager(tmp_path, scheme=scheme, keep=Keep(last=3), threads=1, keyframe_every=3) as manager:
        for step in range(8):
            train()
            report = manager.save(step, model=model, optimizer=optimizer)
            assert report is not None
            states[step] = sp.load(tmp_path, step=step)
        for step in manager.store.steps():
            assert difference(sp.load(tmp_path, step=step), states[step]) is None
        assert any(base.step > one.step for one in manager.store.list() for base in one.bases)
    assert compared and all(tensor is None for tensor in compared)


def test_a_chain_that_was_to_be_written_again_is_though_sizes_have_changed_a_little() -> None:
    limit = ChainLimit(20)
    limit.keep, limit.can_reverse = Keep(last=3), lambda raw_bytes: True
    assert limit.accepts_delta(ChainBytes((8120,), 10_000), 7470, 10_000)
    assert limit.accepts_delta(ChainBytes((8120, 7470), 10_000), 7490, 10_000)
    assert not limit.allows_delta(ChainBytes((8120, 7470, 7490), 10_000))
    limit.note_keyframe()
    keyframe = keyframe_of(8130, 10_000, 3)
    assert limit.wants_reverse(keyframe)  # three keyframes hold less than a chain that ended and two of them
    limit.note_keyframe()
    assert not limit.wants_reverse(keyframe)


@settings(max_examples=300, deadline=None)
@given(
    keyframe=st.floats(0.05, 1.0),
    delta=st.floats(0.02, 1.05),
    reverse=st.floats(0.95, 1.1),
    last=st.sampled_from([1, 2, 3, 4, 6, 10]),
    best=st.sampled_from([None, None, 1, 2, 4]),
    random=st.randoms(use_true_random=False),
)
def test_a_run_whose_sizes_vary_never_holds_more_than_plain_checkpoints(
    keyframe: float, delta: float, reverse: float, last: int, best: int | None, random: Any
) -> None:
    limit, plain, sizes = ChainLimit(20), 100_000, dict[int, int]()
    limit.keep, limit.can_reverse = Keep(last=last, best=best), lambda raw_bytes: True
    held: dict[int, tuple[int, ...]] = {}  # the files that each checkpoint needs, oldest first
    previous: tuple[int, ...] = ()
    scores = [random.random() for _ in range(40)]

    def write(share: float) -> int:
        sizes[len(sizes)] = min(plain, int(share * plain * random.uniform(0.99, 1.01)))
        return len(sizes) - 1

    for step in range(40):
        base, delta_file = ChainBytes(tuple(sizes[file] for file in previous), plain), write(keyframe * delta)
        if held and limit.allows_delta(base) and limit.accepts_delta(base, sizes[delta_file], plain):
            previous = (*previous, delta_file)
        else:
            limit.note_keyframe()
            previous = (write(keyframe),)
        tops = sorted([*held, step], key=lambda step: scores[step])[: best or 0]
        held = {old: files for old, files in held.items() if old > step - last or old in tops} | {step: previous}
        if len(previous) == 1 and len(held) > 1 and limit.wants_reverse(keyframe_of(sizes[previous[0]], plain, step)):
            parents = {old: old > step - last or best is None for old in reversed([*held])}
            newer, written, shares = previous, {step: previous}, []
            for old, is_one_of_last in [*parents.items()][1:]:
                file = write(keyframe * delta * reverse)
                written[old] = (*(newer if is_one_of_last else previous), file)
                newer = written[old] if is_one_of_last else newer
                shares.append(sizes[file] / plain)
            before, after = ({file for files in run.values() for file in files} for run in (held, written))
            if best is None or sum(map(sizes.__getitem__, after)) < sum(map(sizes.__getitem__, before)):
                held = {old: written[old] for old in held}
            limit.note_reversed(ReversedShares(fmean(shares), max(shares)))
        needed = {file for files in held.values() for file in files}
        assert sum(sizes[file] for file in needed) <= len(held) * plain


def keyframe_of(size: int, plain: int, step: int) -> manifests.DirectoryManifest:
    payload = manifests.Payload("rank-00000.safetensors", size, "0" * 32, plain)
    return manifests.Manifest(id="", created="", scheme="", payloads=(payload,), step=step)


def test_the_newest_of_a_chain_that_begins_needs_one_file_and_older_ones_need_newer_ones(tmp_path: Path) -> None:
    with Store(tmp_path, threads=1, keyframe_every=3) as store:
        for step in range(4):
            save_next(store, Keep(last=3), step)
        chains = {one.step: [base.step for base in one.bases] for one in store.list()}
    assert chains == {3: [], 2: [3], 1: [3, 2]}


def test_a_run_goes_on_from_a_checkpoint_that_was_written_again(storage: Storage) -> None:
    with Store(storage, threads=1, keyframe_every=3) as store:
        for step in range(4):
            save_next(store, Keep(last=3), step)
    with Store(storage, threads=1, keyframe_every=5) as again:
        assert difference(again.load(1), near(1)) is None
        save_next(again, Keep(last=3), 2)  # its own base, were it a delta
        assert_loads(again)
        assert again.load(2, keep=False)["step"] == 2 and again.manifest().step == 2
        again.load(1)
        save_next(again, Keep(last=3), 7)
        assert_loads(again)


def test_the_best_stays_whatever_goes_and_what_stays_for_good_becomes_a_keyframe(tmp_path: Path) -> None:
    keep = Keep(last=2, best=1, every=7)
    with Store(tmp_path, threads=1) as store:
        for step in range(1, 31):
            save_next(store, keep, step)
            assert_loads(store)
        assert {7, 14, 21, 28, 30, 29} <= {*store.steps()}
        assert {0.0} == {store.manifest(step).metrics["val_loss"] for step in store.steps()} - {2.0, 1.0, 4.0, 3.0}
        for step in (7, 14, 21):
            assert not {base.step for base in store.manifest(step).bases} - {*range(7, 29, 7)}


@pytest.mark.parametrize("keep", [Keep(last=4, every=2), Keep(last=5, every=3, best=2), Keep(every=2), Keep(best=3)])
def test_no_checkpoint_is_its_own_base(tmp_path: Path, keep: Keep) -> None:
    with Store(tmp_path, threads=1) as store:
        for step in range(1, 16):
            save_next(store, keep, step)
            assert_loads(store)


class Filled(Linkless):
    """Remembers the most bytes of payloads that it ever held."""

    most = 0

    def put(self, key: str, data: Any) -> None:
        super().put(key, data)
        self.most = max(self.most, sum(len(self.get(key)) for key in self.list() if key.endswith(".safetensors")))


def test_meanwhile_there_is_never_more_than_one_plain_checkpoint_beside_those_that_are_kept() -> None:
    def state(step: int) -> dict[str, Any]:
        fixed, fresh = torch.randn(8192, generator=torch.Generator().manual_seed(0)), torch.Generator()
        fixed[:5700] = torch.randn(5700, generator=fresh.manual_seed(step + 1))
        return {"model": {"a": fixed}}

    storage, keep = Filled(), Keep(last=5)
    with Store(storage, threads=1, keyframe_every=5) as store:
        for step in range(11):
            store.chain_limit.keep = keep
            store.save(step, state(step))
            plan = store.prune(keep, dry_run=False, defer=True)
            assert bool(plan.rewrite) == (step in (5, 10))
            assert storage.most <= 6 * 8192 * 4
        assert store.manifest(6).depth == 4 and difference(store.load(6, keep=False), state(6)) is None


def test_the_best_become_deltas_one_by_one_which_takes_no_more_than_one_plain_checkpoint_beside_them() -> None:
    def state(step: int) -> dict[str, Any]:
        fixed, fresh = torch.randn(8192, generator=torch.Generator().manual_seed(0)), torch.Generator()
        fixed[:2200] = torch.randn(2200, generator=fresh.manual_seed(step + 1))
        return {"model": {"a": fixed}}

    storage, keep, held = Filled(), Keep(last=2, best=2), []
    with Store(storage, threads=1) as store:
        for step in range(24):
            storage.most, before = 0, len(store.steps())
            store.chain_limit.keep = keep
            store.save(step, state(step), metrics={"val_loss": float(step * 7 % 11)})
            store.prune(keep, dry_run=False, defer=True)
            assert storage.most <= (max(before, len(store.steps())) + 1) * 8192 * 4
            held.append(sum(file_sizes(store.list()).values()))
            assert all(difference(store.load(one, keep=False), state(one)) is None for one in store.steps())
    assert max(held[4:]) < 2.5 * held[0]  # else four keyframes: those of the best stay


def test_a_mirror_takes_over_what_was_written_again(tmp_path: Path) -> None:
    with sp.CheckpointManager(tmp_path / "run", keep=Keep(last=3), mirror=tmp_path / "mirror", threads=1) as manager:
        for step in range(12):
            manager.save(step, rng=False, extra=near(step))
        manager.flush()
        assert manager.mirror is not None
        for step in manager.mirror.steps():
            assert difference(manager.mirror.load(step, keep=False)["extra"], near(step)) is None
        assert manager.mirror.steps() == manager.store.steps()
        assert manager.mirror.scan().orphans() == []


def test_a_reader_of_earlier_formats_says_that_a_newer_release_wrote_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path, threads=1, keyframe_every=3) as store:
        for step in range(4):
            save_next(store, Keep(last=3), step)
    monkeypatch.setattr(manifests, "REVERSE_FORMAT", 9)
    with pytest.raises(VersionError, match="format 3"):
        Store(tmp_path).load(2)
    assert Store(tmp_path).load(3)["step"] == 3


def chain_to_be_reversed(make: type[Storage]) -> dict[str, bytes]:
    """The content of a store right before its older checkpoints are written again."""
    storage = make()
    with Store(storage, threads=1, keyframe_every=3) as store:
        for step in range(3):
            save_next(store, Keep(last=3), step)
        store.save(3, near(3), metrics={"val_loss": 0.0})
    return {key: storage.get(key) for key in storage.list()}


def filled(make: type[Storage], content: dict[str, bytes]) -> Storage:
    storage = make()
    for key, data in content.items():
        storage.put(key, data)
    return storage


def reverse(storage: Storage) -> None:
    store = Store(storage, threads=1, keyframe_every=3)
    store.chain_limit.keep = Keep(last=3)
    store.chain_limit._delta_ratio = 0.1  # as a process has it that wrote the chain
    store.prune(Keep(last=3), dry_run=False, defer=True)


@pytest.mark.parametrize("make", [MemoryStorage, Linkless])
def test_a_fault_at_any_call_leaves_checkpoints_that_load(make: type[Storage]) -> None:
    content = chain_to_be_reversed(make)
    counted = FaultyStorage(filled(make, content))
    reverse(counted)
    assert "put" in {call.split()[0] for call in counted.log}
    for call in range(1, counted.calls + 1):
        inner = filled(make, content)
        with suppress(ShrinkpointError):
            reverse(FaultyStorage(inner, call, late=bool(call % 2), dead=True))
        assert {1, 2, 3} <= {*Store(inner).steps()}
        assert all(difference(Store(inner).load(step), near(step)) is None for step in (1, 2, 3))
        reverse(inner)
        with Store(inner, threads=1) as last:
            last.lock()  # removes what was interrupted
            assert_loads(last)
            assert list(last.steps()) == [1, 2, 3] and last.scan().orphans() == []
            assert sum(not manifest.bases for manifest in last.list()) == 1


@settings(deadline=None, max_examples=15)
@given(
    kind=st.sampled_from(["local", "linkless"]),
    every=st.sampled_from([None, 2, 3, 20]),
    actions=st.lists(st.sampled_from(["save", "save", "save", "again", "back", "reopen"]), min_size=4, max_size=14),
    keep=st.builds(
        Keep, last=st.integers(1, 4), every=st.none() | st.integers(2, 4), best=st.none() | st.integers(1, 2)
    ),
)
def test_any_run_under_any_rules_keeps_what_is_selected(kind: str, every: Any, actions: list[str], keep: Keep) -> None:
    with tempfile.TemporaryDirectory() as folder:
        storage = place(kind, Path(folder))
        store, step = Store(storage, keyframe_every=every, threads=1), 0
        for action in actions:
            if action == "reopen":
                store.close()
                store = Store(storage, keyframe_every=every, threads=1)
            elif action == "back" and store.steps():
                step = store.steps()[0]
                store.load(step)
            else:
                step += action != "again"
                save_next(store, keep, step)
                assert_loads(store)
                assert store.manifest().step == step
        store.close()


@settings(deadline=None, max_examples=200)
@given(
    keyframe=st.floats(0.02, 1.0),
    delta=st.floats(0.01, 1.0),
    reverse=st.floats(0.8, 1.2),
    kept=st.integers(1, 12),
    longest=st.integers(1, 24),
    can_reverse=st.booleans(),
)
def test_the_spacing_holds_what_a_run_would_hold(
    keyframe: float, delta: float, reverse: float, kept: int, longest: int, can_reverse: bool
) -> None:
    """Against a run that is played file by file: the bytes on the disk, their limit, and no way that holds far less."""
    assume(delta <= keyframe)
    sizes = FileSizes(keyframe, delta, 1.0, *[min(delta * reverse, keyframe)] * 2)
    chosen = choose_spacing(sizes, kept, longest, can_reverse=can_reverse)
    held = played(sizes, kept, chosen.every, chosen.reverse)
    assert sum(held) / len(held) == pytest.approx(chosen.disk)
    assert max(held) <= kept * 1.000001
    ways = [(every, played(sizes, kept, every, False)) for every in range(1, longest + 1)]
    # Keyframes may follow a chain, if deltas become too large.
    fits = {every: every == 1 or (every - 1) * delta + (kept - 1) * keyframe + keyframe <= kept for every, _ in ways}
    allowed = [sum(way) / len(way) for every, way in ways if max(way) <= kept and fits[every]]
    if can_reverse:
        lengths = [every for every in range(2, longest + 1) if every >= kept > 1]
        reversed_ways = [(every, played(sizes, kept, every, True)) for every in lengths]
        allowed += [
            sum(way) / len(way) for every, way in reversed_ways if peak_of_reversal(sizes, kept, every) <= kept + 1
        ]
    assert chosen.disk <= DISK_TOLERANCE * min(allowed) * 1.000001
    if chosen.reverse:
        assert peak_of_reversal(sizes, kept, chosen.every) <= (kept + 1) * 1.000001


def peak_of_reversal(sizes: FileSizes, kept: int, every: int) -> float:
    """Most bytes on the disk while the deltas of a chain are written again, one by one; infinite if it frees none.

    Until the last of them goes, an ended chain stays whole, and deltas against newer checkpoints go one by one.
    """
    assert sizes.reverse is not None
    files = {step: sizes.delta if step else sizes.keyframe for step in range(every + 1)} | {every: sizes.keyframe}
    peak = sum(files.values())
    frees = kept / 2 * sizes.reverse < peak - sizes.keyframe
    for step in range(every - 1, every - kept, -1):
        peak = max(peak, sum(files.values()) + sizes.reverse)
        files[step] = sizes.reverse
    return peak if frees else float("inf")


def played(sizes: FileSizes, kept: int, every: int, reverse: bool) -> list[float]:
    """Bytes on the disk after each save of some chains, once the run is long enough."""
    files: dict[int, float] = {}
    held = []
    saves = every * (2 + 2 * (kept + every) // every)
    for step in range(saves):
        files[step] = sizes.delta if step % every else sizes.keyframe
        begin = step - step % every
        oldest = max(0, step - kept + 1)
        if reverse:
            if step == begin:  # what is older becomes deltas
                files = {other: sizes.reverse or 0.0 for other in files if oldest <= other < step} | {step: files[step]}
            files = {other: size for other, size in files.items() if other >= oldest or begin <= other}
        else:
            files = {other: size for other, size in files.items() if other >= oldest - oldest % every}
        held.append(sum(files.values()))
    return held[-every:]


def test_where_deltas_save_little_there_are_keyframes_alone() -> None:
    sizes = FileSizes(0.79, 0.76, 1.0, 0.77, 0.77)
    for kept in (1, 2, 3, 10):
        assert choose_spacing(sizes, kept, 20, can_reverse=True).every == 1


def test_where_deltas_are_small_a_chain_is_longer_than_what_is_kept() -> None:
    spacing = choose_spacing(FileSizes(0.8, 0.01, 1.0, 0.01, 0.01), 2, 20, can_reverse=True)
    assert spacing.reverse and spacing.every > 5 and spacing.disk < 0.86


def test_deltas_of_a_third_are_written_again_and_take_no_second_keyframe() -> None:
    sizes = FileSizes(0.04, 0.012, 1.0, 0.012, 0.012)
    spacing = choose_spacing(sizes, 3, 20, can_reverse=True)
    assert spacing.reverse and spacing.disk <= DISK_TOLERANCE * (0.04 + 2 * 0.012)
    assert not choose_spacing(sizes, 3, 20, can_reverse=False).reverse
    assert (
        choose_spacing(replace(sizes, delta=0.039, reverse=0.039, largest_reverse=0.039), 3, 20, can_reverse=True).every
        == 1
    )


def test_what_nobody_has_measured_may_be_large() -> None:
    sizes = FileSizes(0.9, 0.55, 1.0)  # with one more keyframe there would be 3.25 states for a moment
    assert not choose_spacing(sizes, 2, 2, can_reverse=True).reverse
    assert choose_spacing(replace(sizes, reverse=0.55, largest_reverse=0.55), 2, 2, can_reverse=True).reverse


def test_one_delta_that_is_large_as_a_reversed_one_counts_in_the_mean_and_in_the_peak() -> None:
    sizes = FileSizes(0.047, 0.025, 1.0, 0.026, 0.055)
    assert choose_spacing(sizes, 10, 20, can_reverse=True).reverse
    assert not choose_spacing(replace(sizes, reverse=0.055), 10, 20, can_reverse=True).reverse
    sizes = FileSizes(0.9, 0.4, 1.0, 0.4, 0.4)
    assert choose_spacing(sizes, 2, 2, can_reverse=True).reverse
    assert not choose_spacing(replace(sizes, largest_reverse=0.9), 2, 2, can_reverse=True).reverse
