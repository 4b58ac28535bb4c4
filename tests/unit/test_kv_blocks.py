"""Pool errors, eviction and small promises of the block manager (the rest: property tests)."""

from __future__ import annotations

from array import array

import pytest

from pocket_backend.kv import BlockManager, BlockPool, IntegrityError, Namespace


def tokens(*ids: int) -> array[int]:
    return array("i", ids)


@pytest.mark.parametrize("size", [0, -1])
def test_pool_needs_blocks(size: int) -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(size)


def test_manager_refuses_unknown_settings() -> None:
    with pytest.raises(ValueError, match="lru, lfu, fifo"):
        BlockManager(4, 4, eviction="random")
    with pytest.raises(ValueError, match="block_size"):
        BlockManager(4, 0)


def test_match_has_to_be_used_before_anything_else_changes() -> None:
    manager = BlockManager(8, 2)
    first = manager.match(Namespace(), tokens(1, 2, 3), 3)
    second = manager.match(Namespace(), tokens(1, 2, 3), 3)
    assert manager.allocate(first, tokens(1, 2, 3), 3) is not None
    with pytest.raises(IntegrityError, match="stale"):
        manager.allocate(second, tokens(1, 2, 3), 3)


def fill(manager: BlockManager, ids: array[int]) -> None:
    """Compute a sequence and let it go."""
    blocks = manager.allocate(manager.match(Namespace(), ids, len(ids)), ids, len(ids))
    assert blocks is not None
    manager.commit(blocks, ids, len(ids))
    manager.free(blocks)


@pytest.mark.parametrize(
    ("policy", "survivor"),
    [("lru", "old and popular"), ("lfu", "old and popular"), ("fifo", "new")],
)
def test_eviction_policies(policy: str, survivor: str) -> None:
    manager = BlockManager(4, 1, eviction=policy)
    popular, new = tokens(1, 9), tokens(2, 9)
    fill(manager, tokens(1))
    fill(manager, tokens(2))
    match = manager.match(Namespace(), popular, 2)
    blocks = manager.allocate(match, popular, 2)  # a hit on (1)
    assert blocks is not None
    manager.free(blocks)
    # Three new blocks of four: one of the two cached ones has to go.
    large = tokens(7, 7, 7)
    assert manager.allocate(manager.match(Namespace(), large, 3), large, 3) is not None
    kept = {
        "old and popular": manager.match(Namespace(), popular, 2).num_tokens,
        "new": manager.match(Namespace(), new, 2).num_tokens,
    }
    assert kept == {name: int(name == survivor) for name in kept}


def test_tail_is_evicted_before_its_head() -> None:
    manager = BlockManager(4, 1)
    ids = tokens(1, 2, 3, 4)
    fill(manager, ids)
    probe = tokens(1, 2, 3, 4, 5)
    lengths = []
    for taken in range(1, 5):
        other = array("i", [9] * taken)
        blocks = manager.allocate(manager.match(Namespace(), other, taken), other, taken)
        assert blocks is not None
        lengths.append(manager.match(Namespace(), probe, 5).num_tokens)
        manager.free(blocks)
    assert lengths == [3, 2, 1, 0]


def test_stale_heap_entries_do_not_accumulate() -> None:
    manager = BlockManager(4, 1)
    fill(manager, tokens(1))
    for _ in range(1000):
        fill(manager, tokens(1, 2))
    assert len(manager._idle._heap) < 200
    manager.check_integrity([])


def test_integrity_check_reports_a_leak_and_a_lost_table() -> None:
    manager = BlockManager(4, 1)
    ids = tokens(1, 2)
    blocks = manager.allocate(manager.match(Namespace(), ids, 2), ids, 2)
    assert blocks is not None
    manager.check_integrity([blocks])
    with pytest.raises(IntegrityError):
        manager.check_integrity([])
    with pytest.raises(IntegrityError):
        manager.check_integrity([blocks, blocks])
