"""Training: `DistributedOptimizer`, and what goes with it. Needs torch."""

from mdas.optimizer.ddp import DDPState, ddp_hook
from mdas.optimizer.distributed import DistributedOptimizer
from mdas.optimizer.joining import join
from mdas.optimizer.scaling import GradScaler

__all__ = ["DDPState", "DistributedOptimizer", "GradScaler", "ddp_hook", "join"]
