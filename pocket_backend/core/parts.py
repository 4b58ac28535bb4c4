"""Which parts a scheduler is made of: those for a model with recurrent state, or the plain ones."""

from __future__ import annotations

from dataclasses import replace

from pocket_backend.core.admission import token_limit
from pocket_backend.core.asking import Ask, execute_request
from pocket_backend.core.config import SchedulerConfig
from pocket_backend.core.lifecycle import Lifecycle
from pocket_backend.core.recurrent import RecurrentLifecycle, RecurrentSharing, asks_with_states
from pocket_backend.core.sharing import BudgetSharing
from pocket_backend.core.step import MemoryInfo


def make_parts(
    memory: MemoryInfo, config: SchedulerConfig, eos: frozenset[int]
) -> tuple[Lifecycle, BudgetSharing, Ask]:
    """Where sequences are, who computes what in a step, and how the executor is asked for it.

    Chosen once, so that models without recurrent state pay nothing for it.
    """
    limit = token_limit(memory)
    if not memory.state_bytes:
        life = Lifecycle(memory, config, eos, limit)
        return life, BudgetSharing(memory, config, life), execute_request
    # A running sequence's state at an earlier position is gone: choices of n > 1 go through the
    # prefix cache instead of copying blocks.
    config = replace(config, block_copies=False)
    recurrent = RecurrentLifecycle(memory, config, eos, limit)
    sharing = RecurrentSharing(memory, config, recurrent)
    return recurrent, sharing, asks_with_states(recurrent.blocks)
