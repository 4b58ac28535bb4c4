"""Hypothesis drives block pool and block manager against models that are too simple to be wrong.

The manager's model is in ``support/kv_model.py``.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_model import KV_SETTINGS, ManagerMachine

from pocket_backend.kv import BlockPool, IntegrityError


class PoolMachine(RuleBasedStateMachine):
    """A pool against a dictionary of reference counts."""

    @initialize(size=st.integers(1, 6))
    def start(self, size: int) -> None:
        self.pool = BlockPool(size)
        self.refs: dict[int, int] = {}

    @rule()
    def take(self) -> None:
        if len(self.refs) == self.pool.num_blocks:
            with pytest.raises(IntegrityError):
                self.pool.take()
        else:
            block = self.pool.take()
            assert block not in self.refs
            self.refs[block] = 1

    @rule(block=st.integers(0, 5))
    def share(self, block: int) -> None:
        if block in self.refs:
            self.pool.share(block)
            self.refs[block] += 1
        elif block < self.pool.num_blocks:
            with pytest.raises(IntegrityError):
                self.pool.share(block)

    @rule(block=st.integers(0, 5))
    def drop(self, block: int) -> None:
        if self.refs.get(block, 0) > 0:
            self.refs[block] -= 1
            assert self.pool.drop(block) == self.refs[block]
        elif block < self.pool.num_blocks:
            with pytest.raises(IntegrityError):
                self.pool.drop(block)

    @rule(block=st.integers(0, 5))
    def give_back(self, block: int) -> None:
        if self.refs.get(block) == 0:
            self.pool.give_back(block)
            del self.refs[block]
        elif block < self.pool.num_blocks:
            with pytest.raises(IntegrityError):
                self.pool.give_back(block)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.num_free == self.pool.num_blocks - len(self.refs)


class CollidingManagerMachine(ManagerMachine):
    collide = True


TestPool = PoolMachine.TestCase
TestManager = ManagerMachine.TestCase
TestManagerUnderCollisions = CollidingManagerMachine.TestCase
TestPool.settings = TestManager.settings = TestManagerUnderCollisions.settings = KV_SETTINGS
