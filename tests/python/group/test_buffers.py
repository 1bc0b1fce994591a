"""What collectives accept, and how they refuse the rest. One process suffices: refusal comes before sending."""

from __future__ import annotations

import array
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import mdas
import processes
from mdas import buffers
from mdas.communicator import CoreCommunicator


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A job of this one process."""
    mdas.init()
    yield
    mdas.shutdown()


def test_any_writable_buffer_is_reduced_in_place() -> None:
    memory = mdas.Memory(8)
    for buffer in (
        array.array("d", [1, 2]),
        bytearray(b"ab"),
        memoryview(bytearray(b"abcd"))[1:3],
        memory,
        np.ones((2, 3)),
    ):
        before = bytes(memoryview(buffer).cast("B"))
        assert mdas.allreduce(buffer) is buffer
        assert bytes(memoryview(buffer).cast("B")) == before


def test_tensors_of_all_types_and_shapes() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        for shape in ((), (0,), (3,), (2, 3, 4)):
            tensor = torch.ones(shape, dtype=dtype)
            assert mdas.allreduce(tensor) is tensor
            out = torch.zeros(shape, dtype=dtype)
            mdas.allreduce(tensor, out=out)
            assert torch.equal(out, tensor)
    flags = torch.tensor([True, False])
    assert mdas.allreduce(flags, "max").tolist() == [True, False]


def test_arrays_without_dimensions() -> None:
    array = np.array(2.5)
    assert mdas.allreduce(array) is array
    assert array[()] == 2.5
    out = np.zeros((), np.float32)
    mdas.allreduce(np.array(7, np.float32), out=out)
    assert out[()] == 7
    assert mdas.allgather(np.array(1.5)).tolist() == [1.5]
    with pytest.raises(TypeError, match=r"float is neither a torch tensor nor .*bytes-like object is required"):
        mdas.allreduce(1.0)


@pytest.mark.parametrize("replace", ["data", "set_"])
@pytest.mark.parametrize("through", ["group", "communicator"])
def test_memory_outlives_a_tensor_that_got_another_storage(replace: str, through: str) -> None:
    zero, one = mdas._core.loopback(2)
    tensor = torch.ones(30_000)
    if through == "group":
        view = buffers.view(tensor, writable=True)
        work = zero.allreduce(0, view, view)
        del view
    else:
        work = CoreCommunicator(zero, 0, 0, 2).allreduce(tensor, tensor)
    if replace == "data":
        tensor.data = torch.zeros(1)
    else:
        tensor.set_(torch.zeros(1))
    # One of these would get the memory, had it been freed.
    others = [torch.full((30_000,), 7.0) for _ in range(8)]
    theirs = torch.ones(30_000)
    CoreCommunicator(one, 0, 1, 2).allreduce(theirs, theirs).wait(30)
    work.wait(30)
    assert torch.equal(theirs, torch.full((30_000,), 2.0))
    assert all(bool((other == 7).all()) for other in others)


def test_new_arrays_have_the_kind_and_type_of_the_input() -> None:
    gathered = mdas.allgather(torch.ones(2, 3, dtype=torch.bfloat16))
    assert (gathered.shape, gathered.dtype) == ((1, 2, 3), torch.bfloat16)
    part = mdas.reduce_scatter(np.ones((4, 2), np.float16))
    assert (part.shape, part.dtype, type(part)) == ((4, 2), np.float16, np.ndarray)


def test_output_may_have_another_kind_and_shape() -> None:
    out = torch.zeros(6)
    mdas.allreduce(np.arange(6, dtype=np.float32).reshape(2, 3), out=out)
    assert out.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_leaf_that_requires_grad_is_reduced_as_data() -> None:
    weight = torch.ones(3, requires_grad=True)
    mdas.allreduce(weight)
    assert weight.requires_grad
    assert weight.is_leaf


def test_autograd_notices_that_a_saved_tensor_was_overwritten() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    z = (y * y).sum()
    mdas.allreduce(y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(4, 4)[:, 1], r"strided tensor of shape \(4,\) with strides \(4,\).*contiguous\(\)"),
        (torch.zeros(2, 3).t(), "strided tensor"),
        (torch.zeros(1).expand(4), "expanded tensor, whose elements share memory"),
        (torch.zeros(2, dtype=torch.complex64), "unsupported element type complex64: supported are float32"),
        (torch.zeros(2, dtype=torch.int16), "unsupported element type int16"),
        (torch.zeros(2, device="meta"), "on meta.*CPU memory"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (np.zeros((4, 4))[:, 1], r"shape \[4\] is not contiguous \(strides of \[32\] bytes\)"),
        (np.asfortranarray(np.zeros((2, 3))), "not contiguous"),
        (np.broadcast_to(np.zeros(1), (4,)), "not contiguous"),
        (np.zeros(3, ">f4"), "unsupported type"),
        (np.zeros(3, np.complex128), "unsupported type"),
        (np.frombuffer(bytearray(9), np.uint8)[1:].view(np.float32), "not aligned"),
        (np.frombuffer(b"1234", np.float32), "read-only"),
        (b"1234", "read-only"),
        ([1.0, 2.0], "list is neither a torch tensor nor does it offer its memory as a buffer"),
        (3.5, "float is neither"),
    ],
)
def test_what_cannot_be_reduced_in_place_is_a_type_error(bad: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        mdas.allreduce(bad)


def test_read_only_input_is_fine_when_the_result_goes_elsewhere() -> None:
    out = bytearray(4)
    assert mdas.allreduce(b"abcd", out=out) == b"abcd"
    with pytest.raises(TypeError, match="read-only"):
        mdas.allreduce(out, out=b"abcd")


def test_output_of_another_type_or_size_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="out has 3 elements, but the input has: 4"):
        mdas.allreduce(np.zeros(4), out=np.zeros(3))
    with pytest.raises(ValueError, match="out has elements of type float32, but the input of type float64"):
        mdas.allreduce(np.zeros(4), out=np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="out has 5 elements"):
        mdas.allgather(np.zeros(4), out=np.zeros(5))
    memory = np.zeros(6)
    with pytest.raises(ValueError, match="overlap"):
        mdas.allreduce(memory[:4], out=memory[1:5])


def test_wrong_arguments_say_which_are_right() -> None:
    with pytest.raises(ValueError, match='op is "mean", but must be one of sum, average, min, max, product'):
        mdas.allreduce(np.zeros(1), "mean")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"average is not defined for int32.*sum"):
        mdas.allreduce(np.zeros(1, np.int32), "average")
    with pytest.raises(ValueError, match='lane is "fast", but must be "bulk" or "urgent"'):
        mdas.barrier(lane="fast")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="root is 1, but the group has ranks 0 to 0"):
        mdas.broadcast(np.zeros(1), 1)
    for timeout in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"timeout is .*positive, finite number of seconds"):
            mdas.barrier(timeout=timeout)
        with pytest.raises(ValueError, match=r"timeout is .*positive, finite number of seconds"):
            mdas.new_group([0], timeout=timeout)
        with pytest.raises(ValueError, match=r"timeout is .*positive, finite number of seconds"):
            mdas.barrier(async_op=True).wait(timeout)
    for group in (0, [0]):
        with pytest.raises(TypeError, match=r"group is .*: pass a Group that mdas.new_group\(\) made"):
            mdas.barrier(group=group)  # type: ignore[call-overload]
    for tag in (-1, 2**32):
        with pytest.raises(ValueError, match=f"tag is {tag}, but tags run from 0 to 4294967295"):
            mdas.barrier(tag=tag)
    with pytest.raises(ValueError, match="rank is -1, but the world has ranks 0 to 0"):
        mdas.new_group([-1])
    with pytest.raises(TypeError, match="ranks is 0, but must be a sequence of world ranks"):
        mdas.new_group(0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="root: '0' is not an integer, but a str"):
        mdas.broadcast(np.zeros(1), "0")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="async_op=True needs out="):
        mdas.allgather(np.zeros(1), async_op=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="pass a writable buffer as out="):
        mdas.allgather(bytearray(3))


def test_a_buffer_cannot_be_resized_while_an_operation_may_use_it() -> None:
    class Late(bytearray):
        """Accepts no length change while it is exported, like every bytearray."""

    engines = mdas._core.loopback(2)
    buffer = Late(b"1234")
    view = mdas._core.View.from_buffer(buffer, True)
    work = engines[0].allreduce(0, view, view)
    del view
    with pytest.raises(BufferError):
        buffer.append(1)
    other = mdas._core.View.from_buffer(bytearray(4), True)
    engines[1].allreduce(0, other, other).wait(30)
    work.wait(30)
    assert buffer == b"1234"


def huge() -> list[int]:
    mdas.init(timeout=100)
    count = 2**31 + 5
    data = np.frombuffer(mdas.Memory(count), np.uint8)
    data[[0, 2**31 - 1, 2**31, count - 1]] = [1, 2, 3, 4 + mdas.rank()]
    mdas.allreduce(data, "sum")
    return [int(data[k]) for k in (0, 1, 2**31 - 1, 2**31, count - 1)]


@pytest.mark.timeout(300)
def test_more_than_two_to_the_31_elements() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {line.split()[0]: int(line.split()[1]) for line in lines}
    if kib["MemAvailable:"] < 7 << 20:
        pytest.skip("needs 7 GiB of free memory")
    for result in processes.run(2, huge, timeout=200):
        assert result.value == [2, 0, 4, 6, 9]


def test_importing_mdas_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, mdas; mdas.init(); mdas.allreduce(bytearray(3)); print({'torch', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "set()\n"
