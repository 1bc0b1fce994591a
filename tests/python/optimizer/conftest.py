import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Ranks are threads already; and one thread per operation gives the same bits everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
