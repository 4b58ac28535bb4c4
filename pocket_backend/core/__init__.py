"""Request state, scheduling policy and step plans. Integers only: no tensors, clocks, threads.

| Module | Concept |
|---|---|
| ``step`` | the contract with executors: ``ExecuteRequest``, ``ExecuteOutput``, ``MemoryInfo`` |
| ``swap`` | the contract for a slower tier of KV blocks: ``BlockSwaps`` |
| ``request`` | one sequence's state: ``ScheduledRequest``, ``RequestStatus``, groups for n > 1 |
| ``config`` | ``SchedulerConfig`` |
| ``plan`` | what ``schedule`` and ``update`` return |
| ``queue`` | waiting requests in policy order |
| ``admission`` | refusals: requests that can never run, a full queue |
| ``deadlines`` | whose time is up |
| ``prefix_wait`` | requests held back while a running one computes their prefix |
| ``lifecycle`` | where each sequence is; the only code that moves one |
| ``recurrent`` | what differs for models with recurrent state |
| ``scheduler`` | ``ContinuousBatchScheduler`` |

Imports ``api`` and ``kv`` only. docs/scheduling.md explains the policy.
"""

from pocket_backend.core.config import SchedulerConfig
from pocket_backend.core.plan import SchedulerStats, SequenceUpdate, StepPlan
from pocket_backend.core.request import RequestStatus, ScheduledRequest
from pocket_backend.core.scheduler import ContinuousBatchScheduler
from pocket_backend.core.step import ExecuteOutput, ExecuteRequest, MemoryInfo, TokenLogprobs
from pocket_backend.core.swap import BlockSwaps

__all__ = [
    "BlockSwaps",
    "ContinuousBatchScheduler",
    "ExecuteOutput",
    "ExecuteRequest",
    "MemoryInfo",
    "RequestStatus",
    "ScheduledRequest",
    "SchedulerConfig",
    "SchedulerStats",
    "SequenceUpdate",
    "StepPlan",
    "TokenLogprobs",
]
