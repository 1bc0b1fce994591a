"""What stands in for the average that is still in flight.

One formula for every prediction: with c the part that all ranks share and g this rank's gradient,

    ghat = c + (1 - alpha) (g - c)

`none` predicts nothing; the others differ in c (the previous average, with or without a sketch of the
change since) and in alpha: 1, 0, or the adaptive confidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SMOOTHING = 0.9


@dataclass(frozen=True, slots=True)
class Prediction:
    """How the average in flight is predicted."""

    sketch: bool
    """Is c the previous average plus a sketch of the change, or just the previous average?"""
    alpha: float | None
    """Weight of c; None: the adaptive confidence."""


PREDICTIONS: dict[str, Prediction | None] = {
    "sketch": Prediction(sketch=True, alpha=1.0),
    "sketch+blend": Prediction(sketch=True, alpha=None),
    "blend": Prediction(sketch=False, alpha=None),
    "history": Prediction(sketch=False, alpha=1.0),
    "local": Prediction(sketch=False, alpha=0.0),
    "none": None,
}


@dataclass(slots=True)
class Confidence:
    """The weight alpha = V / (V + E) that minimizes sum_i p_i |alpha c + (1 - alpha) g_i - gbar|².

    V = sum_i p_i |g_i - c|² - |gbar - c|² says how much the ranks disagree, E = |gbar - c|² how far
    c is off; both smoothed exponentially.
    """

    disagreement: float = 0.0
    error: float = 0.0

    def observe(self, spread: float, error: float) -> None:
        """Takes in one step: spread = sum_i p_i |g_i - c|², error = |gbar - c|².

        A step whose statistics are not finite (a rank's gradient was not) is left out.
        """
        if not (math.isfinite(spread) and math.isfinite(error)):
            return
        new = 1.0 - SMOOTHING
        self.disagreement = SMOOTHING * self.disagreement + new * max(spread - error, 0.0)
        self.error = SMOOTHING * self.error + new * error

    @property
    def alpha(self) -> float:
        """In [0, 1]; 0 where both vanish."""
        total = self.disagreement + self.error
        return self.disagreement / total if total > 0.0 else 0.0
