"""What ranks do in the tests of beginnings, failures and ends. As a script: under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Name and text of what it raises."""
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        return type(error).__name__, str(error)
    return "", ""


def total(group: Any = None) -> float:
    tensor = torch.full((3,), 1.0 + dist.get_rank())
    dist.all_reduce(tensor, group=group)
    return float(tensor[0])


def failures() -> dict[str, Any]:
    """Two ranks; each failure in a group of its own, the world stays sound."""
    import mdas.torch_backend  # noqa: F401

    dist.init_process_group("mdas", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    short = timedelta(seconds=2)
    late, absent, barred, differing = [dist.new_group(timeout=limit) for limit in (None, short, short, None)]
    seen: dict[str, Any] = {}

    # A wait that is over before the operation: the operation goes on.
    if rank == 0:
        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, group=late, async_op=True)
        seen["early"] = (*error_of(lambda: work.wait(timedelta(seconds=0.2))), work.is_completed())
        store.set("come", "1")
        seen["finally"] = (work.wait(), work.is_completed(), work.is_success(), tensor.tolist())
    else:
        store.wait(["come"], timedelta(seconds=60))
        dist.all_reduce(torch.ones(3), group=late)

    # A rank that does not come at all; the group's own timeout.
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=absent, async_op=True)
        future = work.get_future()
        seen["timeout"] = error_of(work.wait)
        seen["future"] = error_of(future.wait)
        seen["state"] = (work.is_completed(), work.is_success(), type(work.exception()).__name__)
        seen["monitored"] = error_of(lambda: dist.monitored_barrier(barred, short, wait_all_ranks=True))
        store.set("done", "1")
    store.wait(["done"], timedelta(seconds=60))

    seen["mismatch"] = error_of(lambda: dist.all_reduce(torch.ones(3 + rank), group=differing))
    seen["self"] = error_of(lambda: dist.isend(torch.ones(1), rank))
    seen["sizes"] = error_of(lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)))
    seen["types"] = error_of(lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2), [2], [1, 1]))
    seen["world"] = total()
    dist.set_timeout(short)
    dist.destroy_process_group()
    return seen


def lost() -> Any:
    """Rank 1 vanishes; a script that never destroys its process group."""
    import mdas.torch_backend  # noqa: F401

    dist.init_process_group("mdas", timeout=timedelta(seconds=60))
    assert total() == 3
    if dist.get_rank() == 1:
        os._exit(0)
    return error_of(total)


def aborting(port: int) -> dict[str, Any]:
    """Rank 0 waits for what rank 1 never starts, aborts, and both make a new process group."""
    import mdas.torch_backend  # noqa: F401

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=60))
    seen: dict[str, Any] = {}
    long = timedelta(seconds=600)
    dist.init_process_group("mdas", store=dist.PrefixStore("one", store), rank=rank, world_size=size, timeout=long)
    part = dist.new_group()
    if rank == 0:
        tensor = torch.ones(3)
        works = [dist.all_reduce(tensor.clone(), group=group, async_op=True) for group in (None, part)]
        dist.distributed_c10d._abort_process_group()
        seen["in flight"] = [error_of(work.wait)[0] for work in works]
        seen["initialized"] = dist.is_initialized()
        store.set("aborted", "1")
    else:
        store.wait(["aborted"], timedelta(seconds=60))
        # What rank 0 had sent of the first one is here already, so that it may even succeed.
        seen["other"] = error_of(lambda: (total(), total()))
        dist.distributed_c10d._abort_process_group()
    dist.init_process_group("mdas", store=dist.PrefixStore("two", store), rank=rank, world_size=size, timeout=long)
    seen["again"] = total()
    # A group that shares the connections is only forgotten.
    short = dist.new_group(timeout=timedelta(seconds=2))
    work = dist.all_reduce(torch.ones(3), group=short, async_op=True) if rank == 0 else None
    dist.distributed_c10d._abort_process_group(short)
    if work is not None:
        seen["shared"] = error_of(work.wait)[0]
    seen["world"] = total()
    dist.destroy_process_group()
    return seen


def joining(path: str, port: int) -> dict[str, Any]:
    """Beside `mdas.init()`, through a file, again, and with a default group of another backend."""
    import mdas
    import mdas.torch_backend

    mdas.init(timeout=60)
    rank, size = mdas.rank(), mdas.size()
    seen: dict[str, Any] = {}
    for attempt in range(2):
        dist.init_process_group("mdas", init_method=f"file://{path}{attempt}", rank=rank, world_size=size)
        seen[f"file {attempt}"] = total()
        dist.destroy_process_group()
    seen["core"] = mdas.allreduce(torch.ones(2)).tolist()
    # The same store, whose keys of the first time are gone.
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=60))
    for attempt in range(2):
        dist.init_process_group("mdas", store=store, rank=rank, world_size=size)
        seen[f"store {attempt}"] = total()
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=size)
    group = dist.new_group([0, 1], backend="mdas")
    seen["within gloo"] = total(group)
    dist.destroy_process_group(group)
    seen["gloo"] = total()
    dist.destroy_process_group()
    mdas.shutdown()
    alone = dist.HashStore()
    dist.init_process_group("mdas", store=alone, rank=0, world_size=1)
    tensor = torch.ones(2)
    dist.all_to_all_single(torch.empty(2), tensor)
    dist.all_gather_into_tensor(torch.empty(2), tensor)
    dist.all_reduce(tensor)
    seen["alone"] = tensor.tolist()
    seen["options"] = error_of(lambda: dist.new_group(backend="mdas", pg_options=object()))
    dist.destroy_process_group()
    return seen


def main() -> None:
    import mdas.torch_backend  # noqa: F401

    for attempt in range(2):
        dist.init_process_group("mdas")
        # One write: whole lines, also unbuffered, as torchrun runs its workers.
        os.write(1, f"rank {dist.get_rank()} attempt {attempt}: {total()}\n".encode())
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
