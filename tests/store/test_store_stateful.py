"""Any sequence of saves, prunes, compactions and accidents, against a dict."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from helpers.stores import PLACES, flip, payloads, place, remove, state, stored_bytes, weights_only
from helpers.strategies import difference
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shrinkpoint.errors import ChainError, FormatError, NotFoundError
from shrinkpoint.store import Keep, Store
from shrinkpoint.store.retention import apply_policy
from shrinkpoint.tensors.flat_state import flatten, snapshot

steps = st.integers(1, 12)
MAX_TRAINED = 8
"""Checkpoints from which on none are trained: all of their chains are decoded after every step of the machine."""


class Machine(RuleBasedStateMachine):
    """`model` maps each step that is shown to the seed of its state; `hurt` holds those that may not load any more, and
    `light` those whose moments were deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.model: dict[int, int] = {}
        self.hurt: set[int] = set()
        self.light: set[int] = set()
        self.damaged: set[str] = set()
        self.seed = self.rules = 0

    @initialize(kind=st.sampled_from(PLACES), every=st.sampled_from([None, 2, 4]))
    def open(self, kind: str, every: int | None) -> None:
        self.kind, self.every = kind, every
        self.storage = place(kind, Path(self.folder.name))
        self.store = Store(self.storage, keyframe_every=every, threads=1)

    def teardown(self) -> None:
        self.check()
        self.store.close()
        self.folder.cleanup()

    @rule(step=steps, adopt=st.booleans(), keyframe=st.sampled_from([False, False, False, True]))
    def save(self, step: int, adopt: bool, keyframe: bool) -> None:
        self.seed += 1
        mine: Any = state(self.seed)
        self.store.save(step, snapshot(flatten(mine)) if adopt else mine, adopt=adopt, keyframe=keyframe)
        mine["model"]["w"].zero_()
        self.model[step] = self.seed
        self.hurt.discard(step)
        self.light.discard(step)
        if self.damaged & {base.digest for base in self.store.manifest(step).bases}:
            self.hurt.add(step)  # a save vouches for its parent's header, and does not read all of the chain again

    @precondition(lambda self: len(self.model) < MAX_TRAINED)
    @rule(count=st.integers(1, 4))
    def train(self, count: int) -> None:
        for _ in range(count):
            self.save(max(self.model, default=0) + 1, adopt=False, keyframe=False)

    @rule(step=steps)
    def forget(self, step: int) -> None:
        if step in self.model:
            self.store.forget(step)
            del self.model[step]
            self.hurt.discard(step)

    @rule(keep=st.builds(Keep, last=st.none() | st.integers(1, 3), every=st.none() | st.integers(1, 4)))
    def prune(self, keep: Keep) -> None:
        listing = self.store.scan()
        plan = self.store.prune(keep, dry_run=False)
        decision = apply_policy(listing.manifests.values(), keep, _now(), forgotten=listing.forgotten)
        assert set(plan.delete) == set(decision.drop) | (set(listing.broken) & listing.forgotten)
        for step in plan.delete:
            self.model.pop(step, None)
            self.hurt.discard(step)

    @rule(
        keep=st.builds(
            Keep,
            last=st.none() | st.integers(1, 3),
            every=st.none() | st.integers(1, 4),
            moments_last=st.none() | st.integers(1, 3),
        ),
        compact=st.booleans(),
        defer=st.booleans(),
    )
    def prune_and_write_again(self, keep: Keep, compact: bool, defer: bool) -> None:
        listing = self.store.scan()
        decision = apply_policy(listing.manifests.values(), keep, _now(), forgotten=listing.forgotten)
        promised = self.store.prune(keep, compact=compact, defer=defer)
        before = stored_bytes(self.storage)
        plan = self.store.prune(keep, compact=compact, defer=defer, dry_run=False)
        if self.kind != "memory":
            assert plan.bytes == before - stored_bytes(self.storage)
        assert plan == promised or defer  # which remembers
        assert set(decision.drop) <= set(plan.delete)
        assert not set(plan.delete) & set(decision.selected)
        assert set(plan.weights_only) <= set(decision.selected[: -(keep.moments_last or 99)])
        self.light |= set(plan.weights_only)
        for step in plan.delete:
            self.model.pop(step, None)
            self.hurt.discard(step)

    @rule(step=steps)
    def compact(self, step: int) -> None:
        if step in self.model:
            try:
                self.store.compact(step)
                assert step in self.hurt or self.store.manifest(step).depth == 0
            except (FormatError, ChainError):
                assert step in self.hurt

    @rule()
    def merge(self) -> None:
        try:
            self.store.compact()
        except (FormatError, ChainError):
            assert self.hurt
            return
        listing = self.store.scan()
        for step in set(listing.visible) - self.hurt:
            assert all(base.step in listing.visible for base in listing.visible[step].bases)

    @rule(resume=st.booleans())
    def reopen(self, resume: bool) -> None:
        self.store.close()
        self.store = Store(self.storage, keyframe_every=self.every, threads=1)
        if resume and set(self.model) - self.hurt:
            at = self.store.restore(weights_only=True)
            assert at.step not in self.hurt or difference(at.state, self.expected(at.step)) is None
            assert {one.step for one in at.skipped} <= self.hurt

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def rmtree(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        if self.kind == "linkless":  # what stands on it is lost with it
            self.hurt |= {one.step for one in self.store.list() if any(base.step == step for base in one.bases)}
        remove(self.storage, step)
        self.model.pop(step)
        self.hurt.discard(step)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), at=st.integers(0, 5000))
    def corrupt(self, data: st.DataObject, at: int) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        keys = payloads(self.storage, step) + [f"step-{step:09d}/manifest.json"] * (self.kind != "linkless")
        above = self.store.list()
        key = data.draw(st.sampled_from(keys))
        digests = {one.digest for one in above if one.step == step}
        # a step that was saved again may hold the file of before, too, for those that stand on it
        digests |= {base.digest for one in above for base in one.bases if base.sibling_key == key}
        flip(self.storage, key, at)
        self.damaged |= digests
        self.hurt |= {step, *(one.step for one in above if any(base.digest in digests for base in one.bases))}

    def expected(self, step: int) -> Any:
        """What a checkpoint that loads decodes to."""
        is_light = self.store.manifest(step).weights_only
        assert is_light == (step in self.light & set(self.model))
        return (weights_only if is_light else state)(self.model[step])

    @invariant()
    def what_was_saved_is_what_loads(self) -> None:
        """Looked at after every third rule and at the end: what is lost stays lost."""
        self.rules += 1
        if self.rules % 3 == 0:
            self.check()

    def check(self) -> None:
        if not hasattr(self, "store"):
            return
        shown = self.store.scan()
        assert set(self.model) - self.hurt <= set(shown.visible) <= set(self.model)
        for step in self.model:
            try:
                loaded = self.store.load(step, keep=False)
            except (FormatError, ChainError, NotFoundError) as error:
                assert step in self.hurt, f"step {step}: {error}"
            else:
                assert difference(loaded, self.expected(step)) is None, "whatever loads is what was saved"
        silent = {one.step for one in self.store.verify() if not one.loads}
        assert silent <= self.hurt


def _now() -> Any:
    from datetime import datetime, timezone

    return datetime.now(timezone.utc)


class TestMachine(Machine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(deadline=None, max_examples=40, stateful_step_count=25)
