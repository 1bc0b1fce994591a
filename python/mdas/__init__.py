"""mdas: data-parallel training whose gradient exchange hides behind computation.

    import mdas, torch
    mdas.init()
    optimizer = mdas.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

Importing it imports neither torch nor numpy; what needs torch does so when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mdas._core import Memory, Work, __version__
from mdas.errors import (
    ClosedError,
    CollectiveTimeoutError,
    ConfigurationError,
    Error,
    InvalidArgumentError,
    MismatchError,
    NonFiniteError,
    NotInitializedError,
    PeerLostError,
)
from mdas.group import Group, allgather, allreduce, barrier, broadcast, new_group, reduce_scatter
from mdas.objects import any, average, broadcast_object
from mdas.session import init, is_initialized, local_rank, local_size, node, rank, shutdown, size

if TYPE_CHECKING:
    from mdas.optimizer import DDPState, DistributedOptimizer, GradScaler, broadcast_state, ddp_hook, join

__all__ = [
    "ClosedError",
    "CollectiveTimeoutError",
    "ConfigurationError",
    "DDPState",
    "DistributedOptimizer",
    "Error",
    "GradScaler",
    "Group",
    "InvalidArgumentError",
    "Memory",
    "MismatchError",
    "NonFiniteError",
    "NotInitializedError",
    "PeerLostError",
    "Work",
    "__version__",
    "allgather",
    "allreduce",
    "any",
    "average",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_state",
    "ddp_hook",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "new_group",
    "node",
    "rank",
    "reduce_scatter",
    "shutdown",
    "size",
]


_NEED_TORCH = ("DDPState", "DistributedOptimizer", "GradScaler", "broadcast_state", "ddp_hook", "join")


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        import mdas.optimizer

        return getattr(mdas.optimizer, name)
    raise AttributeError(f"module 'mdas' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
