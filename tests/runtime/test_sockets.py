"""One channel's socket: what comes in parts, and what must not be waited for."""

import socket

import pytest
import torch

from pipeloom.runtime import Channel, Key
from pipeloom.runtime.errors import BoundaryError, TransferBroken, TransferTimeout
from pipeloom.runtime.lanes import encode_header
from pipeloom.runtime.sockets import _HEADER, SocketReceiver, SocketSender, _bytes_of

CHANNEL, KEY = Channel(0, 1, "forward"), Key(0, 3)
MESSAGE = torch.arange(6.0).reshape(2, 3)


@pytest.fixture(params=[0.0, 0.001], ids=["asleep", "asking"])
def ends(request):
    """A sending socket and the receiver of what is written to it."""
    source, destination = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with source, destination:
        yield source, SocketReceiver(CHANNEL, destination, limit_s=10.0, spin_s=request.param)


def post(receiver, *, shape=(2, 3), dtype=torch.float32):
    return receiver.recv(KEY, None if shape is None else torch.Size(shape), dtype)


def wire(tensor, key=KEY):
    return _HEADER.pack(*encode_header(key, tensor)) + bytes(_bytes_of(tensor))


@pytest.mark.parametrize("shape", [(2, 3), None], ids=["known", "announced"])
@pytest.mark.parametrize("cut", [0, 1, 95, 96, 97, 119])
def test_a_message_may_come_in_two_parts(ends, shape, cut):
    source, receiver = ends
    handle, data = post(receiver, shape=shape), wire(MESSAGE)
    source.sendall(data[:cut])
    assert cut > 0 or not handle.ready()
    source.sendall(data[cut:])
    handle.wait(10.0)
    assert torch.equal(handle.take(), MESSAGE)


@pytest.mark.parametrize("shape", [(2, 3), None], ids=["known", "announced"])
def test_messages_that_came_together_stay_apart(ends, shape):
    source, receiver = ends
    handles = [post(receiver, shape=shape) for _ in range(3)]
    source.sendall(b"".join(wire(MESSAGE + n) for n in range(3)))
    handles[2].wait(10.0)
    assert all(torch.equal(handle.take(), MESSAGE + n) for n, handle in enumerate(handles))


@pytest.mark.parametrize("other", [MESSAGE[:1], torch.zeros(4, 5), MESSAGE.double()])
def test_a_message_of_another_shape_is_refused_before_its_data_is_waited_for(ends, other):
    source, receiver = ends
    handle = post(receiver)
    source.sendall(wire(other))
    with pytest.raises(BoundaryError, match=r"came where \(2, 3\)(.|\n)*hint:"):
        handle.wait(10.0)


def test_a_message_of_another_key_is_refused(ends):
    source, receiver = ends
    handle = post(receiver)
    source.sendall(wire(MESSAGE, Key(0, 4)))
    with pytest.raises(BoundaryError, match="microbatch 4 came where"):
        handle.ready()


def test_nothing_within_the_limit_and_a_closed_end_are_told_apart(ends):
    source, receiver = ends
    handle = post(receiver)
    with pytest.raises(TransferTimeout):
        handle.wait(0.01)
    source.close()
    with pytest.raises(TransferBroken):
        handle.wait(10.0)


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(2.0), torch.zeros(0, 3), torch.ones(2, 3, dtype=torch.bfloat16), MESSAGE],
    ids=["no dimension", "empty", "bfloat16", "plain"],
)
def test_any_tensor_crosses_and_its_memory_is_kept(ends, tensor):
    source, receiver = ends
    handle = post(receiver, shape=tensor.shape, dtype=tensor.dtype)
    SocketSender(CHANNEL, source).send(KEY, tensor.clone(), announce=False)
    handle.wait(10.0)
    assert torch.equal(handle.take(), tensor)
    view = _bytes_of(tensor.clone())  # nothing else holds it
    torch.full_like(tensor, 9)
    assert bytes(view) == bytes(_bytes_of(tensor))
