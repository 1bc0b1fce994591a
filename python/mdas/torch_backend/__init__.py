"""mdas as a backend of `torch.distributed`, for tensors in CPU memory.

    import mdas.torch_backend
    torch.distributed.init_process_group("mdas")

Importing it registers the backend; `mdas.init()` is not needed. See docs/torch-backend.md for what it can do.
"""

from __future__ import annotations

import torch.distributed as dist

from mdas.torch_backend.group import ProcessGroup, create

__all__ = ["ProcessGroup", "register"]


def register() -> None:
    """Makes the name "mdas" known to `torch.distributed`. Harmless if it is known already.

    torch finds this function by itself where it looks for backends among installed packages (entry point
    `torch.distributed.backends`).
    """
    if "MDAS" not in dist.Backend._plugins:
        dist.Backend.register_backend("mdas", create, extended_api=True, devices=["cpu"])


register()
