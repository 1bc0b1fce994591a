"""Small things that scripts exchange beside gradients: plain objects, averages of metrics, flags.

Collective, as all of `mdas.group`. What arrives is data only: nothing is unpickled.
"""

from __future__ import annotations

import array
import json
import zlib
from typing import Any, TypeVar, overload

from mdas.group import Group, _chosen, allreduce, broadcast

Plain = TypeVar("Plain")
Number = int | float


def broadcast_object(obj: Plain | None = None, root: int = 0, *, group: Group | None = None) -> Plain:
    """What rank `root` of the group passes, on all ranks; the others' argument is ignored.

    Args:
        obj: None, a bool, an int, a float, a str, or lists and string-keyed dictionaries of these.
        root: a rank of the group.
        group: None: all ranks.

    Raises:
        TypeError: on all ranks, if the root's object holds anything else.
        MismatchError, PeerLostError, CollectiveTimeoutError: as `broadcast`.
    """
    chosen = _chosen(group)
    content, problem = b"", b""
    if chosen.rank == root:
        fault = _not_plain(obj, "the object")
        if fault is None:
            content = json.dumps(obj).encode()
        else:
            problem = fault.encode()
    # The others must hear of it, too, instead of waiting for bytes that never come.
    lengths = array.array("q", [len(content), len(problem)])
    broadcast(lengths, root, lane="urgent", group=group)
    payload = bytearray(content + problem or sum(lengths))
    broadcast(payload, root, group=group)
    if lengths[1]:
        raise TypeError(
            f"broadcast_object: {payload.decode()}; send None, bool, int, float, str, and lists and dictionaries with "
            "str keys of these"
        )
    result: Plain = json.loads(payload.decode())
    return result


@overload
def average(metrics: Number, *, group: Group | None = None) -> float: ...
@overload
def average(metrics: dict[str, Number], *, group: Group | None = None) -> dict[str, float]: ...
def average(metrics: Number | dict[str, Number], *, group: Group | None = None) -> float | dict[str, float]:
    """The mean over the ranks of a number, or of each number of a dictionary (in float64).

    Raises:
        TypeError: something is not a number.
        MismatchError: the ranks' dictionaries have different keys.
    """
    named = metrics if isinstance(metrics, dict) else {"": metrics}
    keys = sorted(named)
    try:
        values = array.array("d", (float(named[key]) for key in keys))
    except (TypeError, ValueError) as error:
        raise TypeError(f"average: {metrics!r} holds something that is not a number") from error
    allreduce(values, op="average", lane="urgent", tag=zlib.crc32(json.dumps(keys).encode()), group=group)
    if isinstance(metrics, dict):
        return dict(zip(keys, values, strict=True))
    return values[0]


def any(flag: bool, *, group: Group | None = None) -> bool:
    """Is the flag set on any rank? Then it is True on all: to stop together, for example."""
    if not isinstance(flag, bool):
        raise TypeError(f"any: {flag!r} is not a bool")
    value = array.array("B", [flag])
    allreduce(value, op="max", lane="urgent", group=group)
    return bool(value[0])


def _not_plain(obj: Any, where: str) -> str | None:
    """What keeps it from being sent, in words; None if nothing does."""
    if obj is None or isinstance(obj, (bool, str)) or type(obj) in (int, float):
        return None
    if type(obj) is list:
        parts = ((f"{where}[{i}]", item) for i, item in enumerate(obj))
    elif type(obj) is dict:
        for key in obj:
            if not isinstance(key, str):
                return f"a key of {where} is {key!r}, which is not a str"
        parts = ((f"{where}[{key!r}]", item) for key, item in obj.items())
    else:
        return f"{where} is of type {type(obj).__name__}"
    return next((fault for name, item in parts if (fault := _not_plain(item, name))), None)
