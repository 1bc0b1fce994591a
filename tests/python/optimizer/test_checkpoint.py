"""Saved with a gradient in flight, resumed bit for bit."""

import copy
import io
import logging

import pytest
import torch
from ranks import on_core_ranks, on_ranks

from mdas.errors import InvalidArgumentError
from training import base, both_exchanges, exchanged, flat, mlp, sgd, train, wrapped

SHARED = ["none", "history", "sketch"]
OWN = ["local", "blend", "sketch+blend"]
MAKERS = {
    "sgd": sgd,
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def scheduled(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def session(communicator, steps, resume=None, make=sgd, order="module first", **options):
    """Trains `steps`; returns (state, base, forward). A resumed model starts from other weights."""
    model = mlp(seed=0 if resume is None else 5)
    optimizer = wrapped(model, communicator, make, sketch_rank=2, **options)
    scheduler = scheduled(optimizer)
    if resume is not None:
        resume = through_a_file(resume)  # ranks are threads: torch would let them share the tensors
        loads = [
            lambda: model.load_state_dict(resume["model"]),
            lambda: optimizer.load_state_dict(resume["optimizer"]),
        ]
        for load in loads if order == "module first" else reversed(loads):
            load()
        scheduler.load_state_dict(resume["scheduler"])
    train(optimizer, model, steps, communicator.rank, scheduler=scheduler)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    return through_a_file(state), base(model, optimizer), flat(model)


@pytest.mark.parametrize("order", ["module first", "optimizer first"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("fused", [False, True])
@exchanged("predict", SHARED + OWN, ["sketch"])
def test_resumes_bit_for_bit(predict, fused, make, order):
    options = {"predict": predict, "fused": fused, "warmup_steps": 3, "make": make}
    whole = on_ranks(2, lambda c: session(c, range(12), **options))
    first = on_ranks(2, lambda c: session(c, range(7), **options))
    # One file serves all ranks, unless forward weights are each rank's own.
    files = [first[0][0]] * 2 if predict in SHARED else [state for state, _, _ in first]
    second = on_ranks(2, lambda c: session(c, range(7, 12), files[c.rank], order=order, **options))
    for (_, b, w), (_, b2, w2) in zip(whole, second, strict=True):
        assert torch.equal(b, b2)
        assert torch.equal(w, w2)


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_around_the_end_of_the_warm_up(steps):
    options = {"predict": "sketch", "warmup_steps": 3}
    whole = on_core_ranks(2, lambda c: session(c, range(8), **options))
    first = on_core_ranks(2, lambda c: session(c, range(steps), **options))
    second = on_core_ranks(2, lambda c: session(c, range(steps, 8), first[0][0], **options))
    assert torch.equal(whole[1][2], second[1][2])


def test_saving_disturbs_nothing():
    def body(communicator, save):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="sketch+blend", warmup_steps=2)
        train(optimizer, model, range(10), communicator.rank, after=lambda step: save(optimizer))
        return base(model, optimizer), flat(model)

    calm = on_ranks(2, lambda c: body(c, lambda optimizer: None))
    saving = on_ranks(2, lambda c: body(c, lambda optimizer: optimizer.state_dict()))
    for a, b in zip(calm, saving, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("predict", OWN)
def test_another_ranks_file_restarts_the_own_part(predict, caplog):
    options = {"predict": predict, "warmup_steps": 2}
    first = on_ranks(2, lambda c: session(c, range(6), **options))
    assert not torch.equal(first[0][2], first[1][2])
    with caplog.at_level(logging.WARNING, "mdas.optimizer"):
        second = on_ranks(2, lambda c: session(c, range(6, 6), first[0][0], **options))
    assert [r.getMessage() for r in caplog.records if "resumes from the file of rank 0" in r.getMessage()]
    assert len(caplog.records) == 1
    assert torch.equal(second[1][2], first[0][2])  # rank 0's forward weights, for one step
    assert torch.equal(second[1][1], first[1][1])  # base weights are everybody's
    third = on_ranks(2, lambda c: session(c, range(6, 9), first[0][0], **options))
    assert torch.equal(third[0][1], third[1][1])


@pytest.mark.parametrize("predict", [*SHARED, "blend"])
def test_on_another_number_of_ranks(predict, caplog, tmp_path):
    """Rank 0's file, from disk: what depends on the number of ranks starts anew, and it says so."""
    options = {"predict": predict, "warmup_steps": 2, "sketch_rank": 2}

    def first(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, **options)
        train(optimizer, model, range(6), communicator.rank)
        if communicator.rank == 0:
            torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        return base(model, optimizer)

    def second(communicator):
        model = mlp(1)
        optimizer = wrapped(model, communicator, **options)
        optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        start = base(model, optimizer)
        train(optimizer, model, range(6, 10), communicator.rank)
        return start, base(model, optimizer)

    saved = on_ranks(2, first)[0]
    with caplog.at_level("WARNING", "mdas.optimizer"):
        out = on_ranks(3, second)
    for start, end in out:
        assert torch.equal(start, saved)
        assert torch.equal(end, out[0][1])
    said = [record.getMessage() for record in caplog.records if "what was trained on 2" in record.getMessage()]
    assert len(said) == (3 if predict == "blend" else 0)


def test_a_skipped_average_in_flight():
    """Saved while an average that is not finite is pending: it is dropped after resuming, too."""

    def body(communicator, resume=None):
        model = mlp(seed=0 if resume is None else 5)
        optimizer = wrapped(model, communicator, predict="history")
        if resume is None:
            train(optimizer, model, range(4), communicator.rank)
            optimizer.zero_grad()
            (model(torch.ones(1, 8)).sum() * float("nan")).backward()
            optimizer.step()
            resume = through_a_file(optimizer.state_dict())
        else:
            optimizer.load_state_dict(through_a_file(resume))
        train(optimizer, model, range(5, 8), communicator.rank)
        assert optimizer.skipped_steps == 1
        return resume, base(model, optimizer)

    whole = on_ranks(2, body)
    assert torch.isfinite(whole[0][1]).all()
    resumed = on_ranks(2, lambda c: body(c, whole[0][0]))
    assert torch.equal(whole[0][1], resumed[1][1])


@both_exchanges
def test_a_plain_torch_state_starts_the_delay_anew(caplog):
    model = mlp()
    plain = sgd(model)
    train(plain, model, range(3), 0)

    def body(communicator):
        other = mlp(seed=3)
        other.load_state_dict(model.state_dict())
        optimizer = wrapped(other, communicator, predict="history", warmup_steps=2)
        optimizer.load_state_dict(through_a_file(plain.state_dict()))
        train(optimizer, other, range(3, 5), 0)
        return flat(other)

    with caplog.at_level(logging.WARNING, "mdas.optimizer"):
        out = on_ranks(2, body)
    assert "delay and warm-up start anew" in caplog.text
    train(plain, model, range(3, 5), 0)
    assert torch.equal(out[0], flat(model))


def test_a_delayed_run_goes_on_synchronously():
    """On one process, or with schedule="sync": the average in flight is applied at once."""
    first = on_ranks(2, lambda c: session(c, range(6), predict="sketch"))
    alone = on_ranks(1, lambda c: session(c, range(6, 6), first[0][0], predict="sketch"))
    sync = on_ranks(2, lambda c: session(c, range(6, 6), first[0][0], schedule="sync"))
    for _, b, w in (*alone, *sync):
        assert torch.equal(b, first[0][1])
        assert torch.equal(w, first[0][1])


def test_another_model_is_refused_and_nothing_changed():
    state = on_ranks(2, lambda c: session(c, range(4), predict="history"))[0][0]["optimizer"]

    def body(communicator):
        model = torch.nn.Sequential(torch.nn.Linear(8, 23), torch.nn.Linear(23, 24), torch.nn.Linear(24, 3))
        optimizer = wrapped(model, communicator)
        before = flat(model)
        with pytest.raises(InvalidArgumentError, match=r"parameter '2.bias' has shape \(24,\) in the file"):
            optimizer.load_state_dict(state)
        assert torch.equal(flat(model), before)
        with pytest.raises(InvalidArgumentError, match="format 99"):
            optimizer.load_state_dict(state | {"mdas": state["mdas"] | {"format": 99}})

    on_ranks(2, body)


def test_only_between_steps():
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="history")
        train(optimizer, model, range(2), communicator.rank)
        state = optimizer.state_dict()
        model(torch.ones(1, 8)).sum().backward()
        with pytest.raises(RuntimeError, match="between steps"):
            optimizer.load_state_dict(state)
        optimizer.step()

    on_ranks(2, body)


def test_a_deterministic_run_is_resumed_in_the_same_circumstances_only(monkeypatch):
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator)
        train(optimizer, model, range(3), communicator.rank)
        return optimizer.state_dict()

    saved, _ = on_ranks(2, body)
    assert saved["mdas"]["circumstances"]["order of summation"] == "in rank order"

    def resumed(**options):
        def body(communicator):
            model = mlp()
            optimizer = wrapped(model, communicator, **options)
            optimizer.load_state_dict(copy.deepcopy(saved))
            return optimizer._pipeline.measured.steps

        return body

    monkeypatch.setenv("MDAS_DETERMINISTIC", "1")
    assert on_ranks(2, resumed()) == [3, 3]
    with pytest.raises(
        InvalidArgumentError, match=r"bucket_mb: 0\.001 then, 1\.0 now. Restore that, or unset MDAS_DET"
    ):
        on_ranks(2, resumed(bucket_mb=1.0))
    with pytest.raises(InvalidArgumentError, match="ranks: 2 then, 3 now"):
        on_ranks(3, resumed())
    for options, change in {
        "predict": ({"predict": "none"}, "predict: 'sketch' then, 'none' now; sketch_rank: 4 then, None now"),
        "sketch_rank": ({"sketch_rank": 2}, "sketch_rank: 4 then, 2 now"),
        "warmup": ({"warmup_steps": 7}, "warmup_steps: 0 then, 7 now"),
        "schedule": ({"schedule": "sync"}, "schedule: 'delayed' then, 'sync' now"),
        "max_norm": ({"max_norm": 2.0}, "max_norm: None then, 2.0 now"),
    }.values():
        with pytest.raises(InvalidArgumentError, match=change):
            on_ranks(2, resumed(**options))
    plain = {key: value for key, value in saved.items() if key != "mdas"}
    saved = plain
    with pytest.raises(InvalidArgumentError, match="the file does not tell how it was made"):
        on_ranks(2, resumed())
    monkeypatch.setenv("MDAS_DETERMINISTIC", "0")
    assert on_ranks(2, resumed(bucket_mb=1.0)) == [0, 0]


def test_another_ranks_forward_weights_are_no_deterministic_resume(monkeypatch):
    def body(communicator, saved=None):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="blend", warmup_steps=1)
        if saved is not None:
            optimizer.load_state_dict(copy.deepcopy(saved[communicator.rank]))
        train(optimizer, model, range(3), communicator.rank)
        return optimizer.state_dict()

    saved = on_ranks(2, body)
    monkeypatch.setenv("MDAS_DETERMINISTIC", "1")
    on_ranks(2, lambda communicator: body(communicator, saved))
    with pytest.raises(InvalidArgumentError, match="rank whose forward weights they are: 0 then, 1 now"):
        on_ranks(2, lambda communicator: body(communicator, [saved[0], saved[0]]))
