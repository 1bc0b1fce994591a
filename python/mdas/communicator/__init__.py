"""What the optimizer exchanges through: a small protocol; mdas's own core, `torch.distributed`, or nothing at all.

The optimizer knows no more of a network than this protocol. Every rank of the group makes the same
calls in the same order per lane. Where the core exchanges, `tag` travels with the call, so that a rank which
is out of step is told so instead of being given somebody else's bytes; `torch.distributed` has no tags, and
there the order is all that keeps calls apart.
"""

from mdas.communicator.core import CoreCommunicator
from mdas.communicator.process_group import TorchCommunicator
from mdas.communicator.protocol import AloneCommunicator, Communicator, Done, Lane, Op, Work

__all__ = [
    "AloneCommunicator",
    "Communicator",
    "CoreCommunicator",
    "Done",
    "Lane",
    "Op",
    "TorchCommunicator",
    "Work",
]
