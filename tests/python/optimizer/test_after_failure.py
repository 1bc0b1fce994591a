"""What is left to do after a step that failed: look, save, close."""

import logging
import math
import threading
import warnings

import pytest
import torch
from ranks import DEADLINE, FakeNetwork, on_core_ranks, on_ranks

from mdas.errors import MismatchError, NonFiniteError, PeerLostError
from training import base, batch, both_exchanges, flat, loss, mlp, train, wrapped

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("steps", [1, 4])
def test_after_a_lost_rank_base_weights_can_be_saved(steps, fused, caplog):
    """Rank 1 leaves after some steps, whose averages all arrive; that of rank 0's next one never does."""
    network = FakeNetwork(2)
    settled = threading.Event()

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="history", fused=fused)
        train(optimizer, model, range(steps), communicator.rank)
        if communicator.rank == 1:
            assert settled.wait(DEADLINE)
            network.fail(1)
            return
        expected = base(model, optimizer)
        settled.set()
        with pytest.raises(PeerLostError):
            train(optimizer, model, range(steps, steps + 2), 0)
        assert not torch.equal(flat(model), expected)

        with pytest.raises(RuntimeError, match=r"last step\(\) failed with PeerLostError: a rank failed"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"last step\(\) failed with PeerLostError"):
            loss(model, 0, 0).backward()
        model.zero_grad()
        state = model.state_dict()
        assert torch.equal(torch.cat([value.reshape(-1) for value in state.values()]), expected)
        saved = optimizer.state_dict()["mdas"]
        assert saved["pending"] is None
        assert torch.equal(saved["base"]["2.weight"], state["2.weight"])
        x, twin = batch(0, 0)[0], mlp()
        twin.load_state_dict(state)
        with torch.no_grad():
            assert torch.equal(model.eval()(x), twin(x))
        optimizer.close()
        optimizer.close()
        assert torch.equal(flat(model), expected)
        with pytest.raises(RuntimeError, match="is closed"):
            optimizer.step()

    with caplog.at_level(logging.WARNING, "mdas.optimizer"):
        on_ranks(2, body, network)
    assert ["average gradient is lost" in record.getMessage() for record in caplog.records] == [True]


def test_after_an_interrupt_it_says_so(monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="history")
        train(optimizer, model, range(3), communicator.rank)
        expected = base(model, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(optimizer._pipeline, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train(optimizer, model, range(3, 4), communicator.rank)
        for use in (optimizer.step, lambda: optimizer.load_state_dict(optimizer.state_dict())):
            with pytest.raises(RuntimeError, match=r"failed with KeyboardInterrupt: .*restart all ranks from a check"):
                use()
        assert torch.equal(base(model, optimizer), expected)
        optimizer.close()
        assert torch.equal(flat(model), expected)

    on_ranks(2, body)


def test_an_interrupted_update_is_no_checkpoint(monkeypatch):
    """Half of the weights are those of the step before."""

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="history")
        train(optimizer, model, range(3), communicator.rank)
        run, calls = optimizer._update.run, []

        def interrupted(base, real, *rest):
            calls.append(real)
            run(base, real, *rest)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(optimizer._update, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train(optimizer, model, range(3, 4), communicator.rank)
        assert calls, "nothing was interrupted"
        for use in (optimizer.state_dict, model.state_dict, optimizer.close):
            with pytest.raises(RuntimeError, match="interrupted while it changed the weights"):
                use()

    on_ranks(2, body)


@pytest.mark.parametrize("fused", [False, True])
def test_an_interrupt_while_the_sketch_is_awaited_leaves_the_step_whole(fused):
    """The weights are updated bucket by bucket while the last sketches are still on their way."""

    def body(communicator, interrupted):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="sketch", sketch_rank=2, fused=fused)
        train(optimizer, model, range(3), communicator.rank)
        if not interrupted:
            train(optimizer, model, range(3, 4), communicator.rank)
            return base(model, optimizer)
        with pytest.raises(KeyboardInterrupt):
            train(optimizer, model, range(3, 4), communicator.rank, loss=lambda *which: interrupting(optimizer, *which))
        assert torch.isfinite(flat(model)).all()
        return base(model, optimizer)

    def interrupting(optimizer, *which):
        def finish(*args, **options):
            sketch = original(*args, **options)
            complete = sketch.complete

            def interrupt(bucket):
                if bucket == 1 or fused is False:
                    raise KeyboardInterrupt
                complete(bucket)

            sketch.complete = interrupt
            return sketch

        original = optimizer._pipeline.sketcher.finish
        optimizer._pipeline.sketcher.finish = finish
        return loss(*which)

    expected = on_ranks(2, lambda c: body(c, False))
    for ours in on_ranks(2, lambda c: body(c, True)):
        assert torch.equal(ours, expected[0])


@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_lost_while_the_sketch_is_awaited(fused):
    """What was applied is exactly what had arrived."""
    network, trained = FakeNetwork(2), threading.Event()

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="sketch", sketch_rank=2, fused=fused)
        train(optimizer, model, range(3), communicator.rank)
        expected = base(model, optimizer)
        if communicator.rank == 1:
            assert trained.wait(DEADLINE)
            network.fail(1)
            return
        optimizer.zero_grad()
        loss(model, 3, 0).backward()
        trained.set()
        with pytest.raises(PeerLostError):
            optimizer.step()
        saved = optimizer.state_dict()["mdas"]
        assert saved["pending"] is None
        model.zero_grad()
        assert torch.equal(base(model, optimizer), expected)
        assert torch.equal(saved["base"]["0.weight"].reshape(-1), expected[: 8 * 24])

    on_ranks(2, body, network)


def test_close_can_be_repeated_after_it_failed(monkeypatch):
    """And never leaves forward weights behind."""

    def interrupted():
        raise KeyboardInterrupt

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="history")
        train(optimizer, model, range(3), communicator.rank)
        expected = base(model, optimizer)
        with optimizer.base_weights(), pytest.raises(RuntimeError, match="within base_weights"):
            optimizer.close()
        with monkeypatch.context() as patch:
            patch.setattr(optimizer._pipeline, "settled", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.close()
        optimizer.close()
        assert torch.equal(flat(model), expected)

    on_ranks(2, body)


def test_an_evaluation_without_base_weights_fails_with_their_error_only(monkeypatch):
    def fails():
        raise ZeroDivisionError

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="history")
        train(optimizer, model, range(3), communicator.rank)
        model.eval()
        x = batch(0, 0)[0]
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(optimizer._pipeline, "preview", fails)
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    model(x)
        with torch.no_grad():
            seen = model(x)
        with optimizer.base_weights(), torch.no_grad():
            assert torch.equal(seen, model.train()(x))
        train(optimizer, model, range(3, 5), communicator.rank)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(2, body)


@both_exchanges
@pytest.mark.parametrize("options", [{"schedule": "sync"}, {"predict": "blend"}])
def test_a_rank_whose_weights_have_parted_is_named(options):
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, **options)
        train(optimizer, model, range(3), communicator.rank)
        optimizer.check_weights()
        if communicator.rank == 1:
            weights = optimizer._pipeline.base
            (model[0].weight if weights is None else weights.flats[0]).data.view(-1)[5] += 1e-6
        with pytest.raises(MismatchError, match=r"after 3 steps, the base weights of ranks \[1\] differ"):
            optimizer.check_weights()

    on_ranks(3, body)


@both_exchanges
@pytest.mark.parametrize("options", [{"schedule": "sync"}, {"predict": "sketch"}])
def test_parted_weights_are_noticed_by_themselves(options):
    """Every third step; told with the next one, on all ranks."""

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, check_every=3, **options)
        train(optimizer, model, range(4), communicator.rank)
        if communicator.rank == 1:
            weights = optimizer._pipeline.base
            (model[0].weight if weights is None else weights.flats[0]).data.view(-1)[5] += 1e-6
        train(optimizer, model, range(4, 6), communicator.rank)
        with pytest.raises(MismatchError, match=r"check_every: after 6 steps, the base weights of ranks \[1\] differ"):
            train(optimizer, model, range(6, 7), communicator.rank)
        with pytest.raises(RuntimeError, match=r"the last step\(\) failed with MismatchError"):
            train(optimizer, model, range(7, 8), communicator.rank)

    on_ranks(3, body)


def test_checking_changes_nothing():
    def body(communicator):
        weights = []
        for every in (None, 1, 2):
            model = mlp()
            optimizer = wrapped(model, communicator, check_every=every)
            train(optimizer, model, range(5), communicator.rank)
            optimizer.close()
            weights.append(flat(model))
        return all(torch.equal(weights[0], other) for other in weights[1:])

    assert on_core_ranks(2, body) == [True, True]


def test_errors_call_ranks_what_the_job_calls_them():
    def body(communicator):
        communicator.ranks = (4, 7)
        own = communicator.rank
        model = mlp(own)
        options = {"schedule": "sync", "nan_check": "raise"}
        with pytest.raises(MismatchError, match=r"rank 4 has .*bucket_mb=0\.001.* but rank 7 has .*bucket_mb=2"):
            wrapped(model, communicator, **options, bucket_mb=[0.001, 2][own])
        optimizer = wrapped(model, communicator, **options)
        with torch.no_grad():
            model[0].weight[0, 0] += own
        with pytest.raises(MismatchError, match=r"of ranks \[7\] differ"):
            optimizer.check_weights()
        (loss(model, 0, own) * [1, math.nan][own]).backward()
        with pytest.raises(NonFiniteError, match="on rank 7 has a NaN"):
            optimizer.step()

    on_ranks(2, body)
