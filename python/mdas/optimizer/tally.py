"""The small exchange of statistics that accompanies each step.

A tally is launched without waiting and read when the average of the same step is: one step later if
that is delayed. It never shares a message with gradients, whose order of summation would change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from mdas.communicator import Communicator, Work, tags


@dataclass(slots=True)
class Tally:
    """Statistics of one step: what a rank contributes, or their sum over all ranks."""

    spread: float = 0.0
    """sum_i p_i |g_i - c|²: how far the ranks' gradients are from the shared prediction c."""
    square: float = 0.0
    """sum_i p_i |g_i|²"""
    samples: float = 0.0
    """Samples that the user reported with `observe`."""
    loss: float = 0.0
    """sum of loss times samples, over the ranks that reported one."""
    weight: float = 0.0
    """Samples behind `loss` (1 per rank that did not report any)."""
    nonfinite: float = 0.0
    """Number of ranks whose own gradient had a NaN or an infinity."""
    culprit: float = 0.0
    """Sum of the numbers of these ranks within the group: the rank itself if it is but one."""
    parameter: float = 0.0
    """Sum of the numbers, in the layout, of each such rank's first parameter with a NaN or an infinity."""
    exposed: float = 0.0
    """Seconds for which ranks waited for communication in the step before."""
    compute: float = 0.0
    """Seconds between the end of the step before and the start of this one."""
    bulk: float = 0.0
    """Seconds for which the buckets of the last average that arrived were in flight."""
    urgent: float = 0.0
    """Seconds for which its tally was."""
    active: float = 0.0
    """Ranks that had data; the others take part with nothing (see `mdas.join`)."""
    unit: float = 0.0
    """Sum, over these ranks, of what the loss was multiplied by (see `mdas.GradScaler`)."""
    unit_square: float = 0.0
    """Sum of its squares: with the sum it tells whether all had the same."""
    average_square: float = 0.0
    """|gbar|² of the last average that arrived; from rank 0."""
    error: float = 0.0
    """|gbar - c|² of the last average that arrived; from rank 0."""


_FIELDS = tuple(field.name for field in fields(Tally))

_TRAINED = 2.0**26
"""Two counts in one float64, which holds integers up to 2^53: ranks that used a parameter, and this many times those
on which it requires a gradient.
"""


class TallyExchange:
    """One tally under way at a time, with two flags per parameter: was it used in this step, is it trained at all?"""

    def __init__(self, communicator: Communicator, parameters: int) -> None:
        self._communicator = communicator
        self.size = communicator.size
        self._input = communicator.memory(len(_FIELDS) + parameters, torch.float64)
        self._output = communicator.memory(len(_FIELDS) + parameters, torch.float64)

    def launch(self, tally: Tally, used: Sequence[bool], trained: Sequence[bool]) -> Work:
        """Starts the exchange. The tally before must have been read."""
        values = [getattr(tally, name) for name in _FIELDS]
        values.extend(u + _TRAINED * t for u, t in zip(used, trained, strict=True))
        self._input.copy_(torch.tensor(values, dtype=torch.float64))
        return self._communicator.allreduce(self._input, self._output, op="sum", lane="urgent", tag=tags.TALLY)

    def read(self) -> tuple[Tally, list[bool], bool]:
        """The sum over all ranks, which parameters any rank used, and whether all ranks that had data train the same
        ones, with the same unit; after the work is done.
        """
        values = self._output.tolist()
        tally = Tally(*values[: len(_FIELDS)])
        counts = [divmod(count, _TRAINED) for count in values[len(_FIELDS) :]]
        alike = all(trained in (0, tally.active) for trained, _ in counts)
        # Equal in the inequality of Cauchy and Schwarz only if all units are. (Not so for a NaN, either.)
        same_unit = abs(tally.active * tally.unit_square - tally.unit**2) <= 1e-9 * tally.unit**2
        return tally, [used > 0 for _, used in counts], alike and same_unit
