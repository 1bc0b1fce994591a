"""What `state_dict()` holds beside the wrapped optimizer's state, and how training goes on from it.

A vector is saved as a dictionary from parameter names to tensors, so that a file does not depend on the
division into buckets. Everything can be loaded with `torch.load(..., weights_only=True)`.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor

from mdas.errors import InvalidArgumentError
from mdas.optimizer.buckets import Layout, Vector
from mdas.optimizer.hooks import Round
from mdas.optimizer.pipeline import Pipeline
from mdas.optimizer.predict import PREDICTIONS, Confidence
from mdas.optimizer.shards import local
from mdas.optimizer.tally import Tally
from mdas.optimizer.update import Clip

logger = logging.getLogger("mdas.optimizer")

FORMAT = 1


def save(pipeline: Pipeline, rank: int, predict: str) -> dict[str, Any]:
    """Waits for the exchange in flight, and changes nothing. The tensors are copies. An average that is lost
    with a rank is left out.
    """
    layout, pending = pipeline.layout, pipeline.settled()
    saved: dict[str, Any] = {
        "format": FORMAT,
        "rank": rank,
        "size": pipeline.size,
        "predict": predict,
        "steps": pipeline.measured.steps,
        "skipped": pipeline.measured.skipped,
        "unit": pipeline.unit,
        "confidence": dataclasses.asdict(pipeline.confidence),
        "informed": pipeline.informed,
        "history": _named(layout, pipeline.history),
        "used": _flags(layout, pipeline.used),
        "tally": dataclasses.asdict(pipeline.tally),
        "base": None,
        "pending": None,
        "bases": None,
    }
    if pipeline.base is not None:
        saved["base"] = _named(layout, pipeline.base)
        saved["forward"] = {p.name: local(p.parameter).detach().clone() for p in layout.places}
    if pipeline.sketcher is not None:
        places = layout.places
        saved["bases"] = {places[m.index].name: m.basis.clone() for m in pipeline.sketcher.matrices}
    if pending is not None:
        assert pending.tally is not None
        saved["pending"] = {
            "average": _named(layout, pending.average),
            "used": _flags(layout, pending.used),
            "tally": dataclasses.asdict(pending.tally),
            "hyper": pending.hyper,
            "clip": dataclasses.asdict(pending.clip),
            "shared": None,
        }
        if pipeline.adaptive and pending.shared is not pipeline.history:
            assert pending.shared is not None
            saved["pending"]["shared"] = _named(layout, pending.shared)
    return saved


def of_one_rank(saved: dict[str, Any]) -> bool:
    """Does it hold forward weights that are one rank's own, while others have theirs?"""
    prediction = PREDICTIONS[saved["predict"]]
    return saved["base"] is not None and prediction is not None and prediction.alpha != 1.0


def warn_of_another_rank(saved: dict[str, Any], rank: int) -> None:
    """Is it a file of another rank that holds what is that rank's own?"""
    if of_one_rank(saved) and saved["rank"] != rank:
        logger.warning(
            "rank %d resumes from the file of rank %d: with predict=%r forward weights are each rank's own, "
            "so those of the next step are that rank's. Save and load a file per rank to resume exactly.",
            rank,
            saved["rank"],
            saved["predict"],
        )


def load(pipeline: Pipeline, saved: dict[str, Any], predict: str) -> None:
    """Goes on where `save` was called, with what `check` has found good. Parameters become the forward
    weights.
    """
    layout = pipeline.layout
    if saved["predict"] != predict:
        logger.warning("resuming with predict=%r what was trained with predict=%r", predict, saved["predict"])
    pipeline.restart()
    pipeline.measured.steps, pipeline.measured.skipped = saved["steps"], saved["skipped"]
    pipeline.unit = saved.get("unit", 1.0)
    size = saved.get("size", pipeline.size)
    if size == pipeline.size:
        pipeline.confidence = Confidence(**saved["confidence"])
    elif pipeline.adaptive:
        # How much ranks disagree depends on how many samples each of them has.
        logger.warning(
            "resuming on %d ranks what was trained on %d: the averages behind the confidence start anew; all the rest "
            "goes on",
            pipeline.size,
            size,
        )
        pipeline.confidence = Confidence()
    pipeline.informed = saved["informed"]
    _fill(layout, pipeline.history, saved["history"])
    pipeline.used = [saved["used"][p.name] for p in layout.places]
    pipeline.tally = Tally(**saved["tally"])
    if pipeline.sketcher is not None and saved["bases"] is not None:
        for m in pipeline.sketcher.matrices:
            basis = saved["bases"].get(layout.places[m.index].name)
            if basis is not None and basis.shape == m.basis.shape:
                m.basis.copy_(basis)
    if saved["base"] is None:
        return
    forward = saved["forward"]
    torch._foreach_copy_(layout.parameters, [forward[p.name] for p in layout.places])
    base = layout.vector()
    _fill(layout, base, saved["base"])
    pipeline.resume(base, None if saved["pending"] is None else _pending(pipeline, saved["pending"]))


def _pending(pipeline: Pipeline, saved: dict[str, Any]) -> Round:
    """A round that has arrived already."""
    layout = pipeline.layout
    round = pipeline.other_round()
    _fill(layout, round.average, saved["average"])
    round.used = [saved["used"][p.name] for p in layout.places]
    round.tally, round.whole = Tally(**saved["tally"]), True
    round.hyper = saved["hyper"]
    round.unit = pipeline.unit
    if "clip" in saved:
        round.clip = Clip(**saved["clip"])
    round.shared = pipeline.history
    if saved["shared"] is not None and pipeline.sketched is not None:
        _fill(layout, pipeline.sketched, saved["shared"])
        round.shared = pipeline.sketched
    return round


def check(layout: Layout, saved: dict[str, Any]) -> None:
    """Raises InvalidArgumentError if it was saved by another version or with another model."""
    if saved.get("format") != FORMAT:
        raise InvalidArgumentError(
            f"load_state_dict: the file has format {saved.get('format')}, this version of mdas reads {FORMAT}"
        )
    history = saved["history"]
    ours = {p.name: p.shape for p in layout.places}
    for name in [*ours, *history]:
        theirs = history[name].shape if name in history else None
        if ours.get(name) != theirs:
            raise InvalidArgumentError(
                f"load_state_dict: parameter {name!r} has shape {_shape(theirs)} in the file, but "
                f"{_shape(ours.get(name))} in this model"
            )


def _shape(shape: torch.Size | None) -> str:
    return "no place" if shape is None else str(tuple(shape))


def _named(layout: Layout, vector: Vector) -> dict[str, Tensor]:
    return {p.name: vector.views[p.index].clone() for p in layout.places}


def _flags(layout: Layout, flags: list[bool]) -> dict[str, bool]:
    return {p.name: bool(flags[p.index]) for p in layout.places}


def _fill(layout: Layout, vector: Vector, named: dict[str, Tensor]) -> None:
    torch._foreach_copy_(vector.views, [named[p.name] for p in layout.places])
