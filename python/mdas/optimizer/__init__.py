"""Training: `DistributedOptimizer`, and what goes with it. Needs torch."""

from mdas.optimizer.ddp import DDPState, ddp_hook
from mdas.optimizer.distributed import DistributedOptimizer
from mdas.optimizer.joining import join
from mdas.optimizer.scaling import GradScaler
from mdas.optimizer.states import broadcast_state

__all__ = ["DDPState", "DistributedOptimizer", "GradScaler", "broadcast_state", "ddp_hook", "join"]
