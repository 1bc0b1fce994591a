"""The distributed optimizer."""

from mdas.optimizer.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
