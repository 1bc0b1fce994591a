"""The same bits again: what they depend on beside data and random state, kept in checkpoints.

Nothing in a run depends on timing: the order of summation follows from what is listed here and from lengths, averages
are applied at fixed steps, and what is decided (a skipped update, the confidence) is decided from averages. So there is
nothing to switch off; with MDAS_DETERMINISTIC=1 a checkpoint is not resumed under circumstances in which the run would
go on with other bits.
"""

from __future__ import annotations

import os

import torch

from mdas import settings
from mdas.communicator import Communicator
from mdas.errors import InvalidArgumentError

Circumstances = dict[str, str | int | float | None]


def circumstances(communicator: Communicator, update: str, options: Circumstances) -> Circumstances:
    """What bits depend on, by name; `options`: those of the optimizer that have a part in it."""
    return {
        "order of summation": communicator.summation,
        "ranks": communicator.size,
        **options,
        "update": update,
        "torch": str(torch.__version__),
        "torch threads": torch.get_num_threads(),
    }


def deterministic() -> bool:
    """Is MDAS_DETERMINISTIC set? Raises ConfigurationError if it makes no sense."""
    return settings.read(os.environ).deterministic


def require_same(saved: Circumstances | None, now: Circumstances) -> None:
    """Raises InvalidArgumentError if MDAS_DETERMINISTIC is set, and a checkpoint was made under other circumstances."""
    if not deterministic():
        return
    if saved is None:
        raise InvalidArgumentError(
            "load_state_dict: MDAS_DETERMINISTIC is set, but the file does not tell how it was made: an older version "
            "of mdas wrote it, or torch alone"
        )
    changed = [
        f"{name}: {saved.get(name)!r} then, {value!r} now" for name, value in now.items() if saved.get(name) != value
    ]
    if changed:
        raise InvalidArgumentError(
            "load_state_dict: training would go on with other bits than the run that was saved; "
            f"{'; '.join(changed)}. Restore that, or unset MDAS_DETERMINISTIC"
        )
