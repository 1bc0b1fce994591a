"""Which memory of others may stay registered from one operation to the next."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from mdas import _core, identity


@pytest.fixture(autouse=True)
def in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over RDMA."""
    monkeypatch.setattr(_core, "verbs_in_use", lambda: True)


def test_arrays_on_the_same_memory_are_the_same_and_others_are_not() -> None:
    array = np.zeros((10, 10), np.float32)
    first = identity.of_array(array)
    assert first is not None
    for view in (array, array[2:4], array.reshape(-1), array.T, array.view(np.int32), array[1:][1:]):
        assert identity.of_array(view) is first
    assert identity.of_array(array.copy()) is not first


def test_an_array_is_forgotten_when_it_dies() -> None:
    known = len(identity._known)
    array = np.zeros(100)
    view = array[10:]
    first = identity.of_array(array)
    del array
    assert identity.of_array(view) is first
    assert len(identity._known) == known + 1
    del view
    gc.collect()
    assert len(identity._known) == known


@pytest.mark.parametrize("options", [{}, {"refcheck": False}])
def test_numpy_resizes_no_array_that_may_be_registered(options: dict[str, bool]) -> None:
    array = np.zeros(100)
    identity.of_array(array)
    with pytest.raises(ValueError, match="cannot resize"):
        array.resize(10, **options)
    assert array.size == 100


def test_an_array_that_got_other_memory_is_another_one() -> None:
    array = np.zeros(100)
    first = identity.of_array(array)
    array.__setstate__(np.ones(200).__reduce__()[2])
    assert array.size == 200
    assert identity.of_array(array) is not first


def test_tensors_on_a_fixed_storage_are_the_same() -> None:
    array = np.zeros(100, np.float32)
    tensor = torch.from_numpy(array)
    first = identity.of_tensor(tensor)
    assert first is not None
    view = tensor[10:].detach()
    del tensor
    gc.collect()
    assert identity.of_tensor(view) is first
    view.set_(torch.from_numpy(np.zeros(100, np.float32)))
    assert identity.of_tensor(view) not in (first, None)
    known = len(identity._known)
    del view
    gc.collect()
    assert len(identity._known) == known - 1


def test_a_storage_that_can_be_resized_is_never_the_same() -> None:
    tensor = torch.ones(10_000_000)
    assert identity.of_tensor(tensor) is None
    storage = tensor.untyped_storage()
    storage.resize_(0)
    storage.resize_(40_000_000)  # most often at the same address, which would tell nothing
    assert identity.of_tensor(tensor) is None
    tensor.numpy()
    first = identity.of_tensor(tensor)
    assert first is not None
    assert identity.of_tensor(tensor.view(100, -1)) is first
    with pytest.raises(RuntimeError, match="not resizable"):
        storage.resize_(0)


def test_without_rdma_nobody_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "verbs_in_use", lambda: False)
    array = np.zeros(100)
    assert identity.of_array(array) is None
    array.resize(10)
    assert array.size == 10
    assert identity.of_tensor(torch.from_numpy(array)) is None
