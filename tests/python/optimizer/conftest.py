import pytest
import ranks
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Ranks are threads already; and one thread per operation gives the same bits everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def exchange(request, monkeypatch):
    """What the test calls ("ours"), or torch.distributed ("torch"). See `training.exchanged`."""
    monkeypatch.setattr(ranks, "through_torch", getattr(request, "param", "ours") == "torch")
