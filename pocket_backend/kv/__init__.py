"""KV memory: which block ids are free, held by sequences, or kept for their prefix.

This package owns *ids*; an executor owns the storage behind them. ``BlockManager`` is the only
entry point for the scheduler. Imports nothing but ``api``.

| Module | Concept |
|---|---|
| ``pool`` | ids and reference counts |
| ``radix`` | prefix tree of fully written blocks, one root per namespace |
| ``eviction`` | which idle block goes first |
| ``manager`` | match, allocate, grow, commit, fork, free |
| ``snapshots`` | ids of saved recurrent states |
| ``recurrent`` | the manager of models that have such states |
"""

from pocket_backend.kv.manager import BlockManager, BlockUsage, PrefixMatch, SequenceBlocks
from pocket_backend.kv.pool import BlockPool, IntegrityError
from pocket_backend.kv.radix import Namespace
from pocket_backend.kv.recurrent import RecurrentBlockManager
from pocket_backend.kv.snapshots import SnapshotPool, SnapshotUsage

__all__ = [
    "BlockManager",
    "BlockPool",
    "BlockUsage",
    "IntegrityError",
    "Namespace",
    "PrefixMatch",
    "RecurrentBlockManager",
    "SequenceBlocks",
    "SnapshotPool",
    "SnapshotUsage",
]
