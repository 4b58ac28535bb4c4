"""KV memory: which block ids are free, held by sequences, or kept for their prefix.

This package owns *ids*; an executor owns the storage behind them. ``BlockManager`` is the only
entry point for the scheduler; ``BlockTables`` is for executors. Imports nothing but ``api``.

| Module | Concept |
|---|---|
| ``pool`` | ids and reference counts |
| ``radix`` | prefix tree of fully written blocks, one root per namespace |
| ``eviction`` | which idle block goes first |
| ``manager`` | match, allocate, grow, commit, fork, free |
| ``tables`` | an executor's block tables as one int32 array |
"""

from pocket_backend.kv.manager import BlockManager, BlockUsage, PrefixMatch, SequenceBlocks
from pocket_backend.kv.pool import BlockPool, IntegrityError
from pocket_backend.kv.radix import Namespace
from pocket_backend.kv.tables import BlockTables

__all__ = [
    "BlockManager",
    "BlockPool",
    "BlockTables",
    "BlockUsage",
    "IntegrityError",
    "Namespace",
    "PrefixMatch",
    "SequenceBlocks",
]
