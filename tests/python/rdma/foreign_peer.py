"""A peer of the verbs transport that shares no code with it: the protocol of rust/core/src/transport/verbs in pyverbs.

    python3 foreign_peer.py PORT        where Debian's python3-pyverbs and an RDMA device are

Meets the transport on a local port, and exchanges queue pairs. A landing area comes in a control frame; it writes COUNT
bytes there. Then it offers memory of its own, and looks at what the transport writes to it.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
import time
from typing import Any

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

HEAD = struct.Struct("<8sB")
"""Magic; number of queue pairs, the urgent one first."""
CARD = struct.Struct("<II16sHIB")
"""Of each: number, first packet number, GID, LID, MTU, GRH needed."""
OFFER = struct.Struct("<QQ")
"""A landing area: address; rkey, and the number that is to come as the immediate (its low 3 bits name the rail)."""
COUNT = 100_000
FRAME = 8192


GID_INDEX = 1


def to_rts(pair: QP, ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    """Connects a queue pair with the one of that card."""
    number, packet, gid, _, mtu, _ = theirs
    route = GlobalRoute(dgid=GID(ipaddress.IPv6Address(gid).exploded), sgid_index=GID_INDEX)
    attributes = QPAttr(port_num=1)
    attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
    attributes.path_mtu = mtu.bit_length() - 8
    attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = number, packet, ours[1]
    attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
    attributes.timeout, attributes.retry_cnt, attributes.rnr_retry, attributes.min_rnr_timer = 14, 7, 7, 12
    pair.to_rts(attributes)


def wait(queue: CQ, opcode: int) -> Any:
    """The next completion of that kind."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        _, found = queue.poll(1)
        for completion in found or ():
            if completion.status != e.IBV_WC_SUCCESS:
                raise RuntimeError(f"a work completion has status {completion.status}")
            if completion.opcode == opcode:
                return completion
    raise TimeoutError(f"no completion with opcode {opcode} within 60 s")


def main(port: int) -> None:
    """Meets, is written to, writes."""
    meeting = socket.create_connection(("127.0.0.1", port), timeout=60)
    context = Context(name="rxe0")
    domain, queue = PD(context), CQ(context, 256)
    access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
    memory, frames = MR(domain, COUNT, access), MR(domain, 32 * FRAME, access)
    capacity = QPCap(max_send_wr=16, max_recv_wr=32)
    initial = QPAttr(port_num=1)
    initial.qp_access_flags = access
    pairs = [QP(domain, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=queue, rcq=queue, cap=capacity), initial) for _ in "ub"]

    gid = socket.inet_pton(socket.AF_INET6, str(context.query_gid(1, GID_INDEX)))
    ours = [(pair.qp_num, 11 + 11 * k, gid, 0, 4096, 0) for k, pair in enumerate(pairs)]
    meeting.sendall(HEAD.pack(b"mdas ib2", 2) + b"".join(CARD.pack(*card) for card in ours))
    assert meeting.recv(HEAD.size, socket.MSG_WAITALL) == HEAD.pack(b"mdas ib2", 2)
    theirs = [CARD.unpack(meeting.recv(CARD.size, socket.MSG_WAITALL)) for _ in pairs]
    for k in range(32):
        for pair in pairs:  # of the second only the completions are wanted
            pair.post_recv(RecvWR(wr_id=k, num_sge=1, sg=[SGE(frames.buf + k * FRAME, FRAME, frames.lkey)]))
    for pair, own, other in zip(pairs, ours, theirs, strict=True):
        to_rts(pair, own, other)
    meeting.sendall(b"r")
    assert meeting.recv(1) == b"r"

    offer = wait(queue, e.IBV_WC_RECV)
    address, rest = OFFER.unpack(frames.read(OFFER.size, offer.wr_id * FRAME))
    memory.write(bytes(k % 251 for k in range(COUNT)), COUNT)
    piece = [SGE(memory.buf, COUNT, memory.lkey)]
    immediate = socket.htonl(rest & 0xFFFF_FFFF)
    request = SendWR(opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM, num_sge=1, sg=piece, imm_data=immediate)
    request.set_wr_rdma(rest >> 32, address)
    pairs[1].post_send(request)
    wait(queue, e.IBV_WC_RDMA_WRITE)

    landing = 8  # on rail 0
    frames.write(OFFER.pack(memory.buf, memory.rkey << 32 | landing), OFFER.size)
    piece = [SGE(frames.buf, OFFER.size, frames.lkey)]
    pairs[0].post_send(SendWR(opcode=e.IBV_WR_SEND_WITH_IMM, num_sge=1, sg=piece))
    written = wait(queue, e.IBV_WC_RECV_RDMA_WITH_IMM)
    assert (written.byte_len, socket.ntohl(written.imm_data)) == (COUNT, landing)
    assert memory.read(COUNT, 0) == bytes(k % 241 for k in range(COUNT))
    meeting.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
