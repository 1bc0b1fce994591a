"""Training: `DistributedOptimizer`, and what goes with it. Needs torch."""

from mdas.optimizer.distributed import DistributedOptimizer
from mdas.optimizer.joining import join

__all__ = ["DistributedOptimizer", "join"]
