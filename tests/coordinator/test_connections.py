"""The coordinator's connections: bulk data passes, everything else becomes an input, older connections do not count."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import pytest

from psctl.checkpoint.writer import CheckpointWriter
from psctl.coordinator.connections import CoordinatorConnections
from psctl.coordinator.sessions import MemberSessions
from psctl.coordinator.state.instructions import ConnectionLost, MessageReceived, ProtocolBroken, SendMessage
from psctl.errors import MessageRefused, PeerLost
from psctl.job.checkpoint_messages import LoadEnd, LoadPart, LoadWanted, SaveBegin, SaveEnd, SavePart
from psctl.job.job_permits import COORDINATION
from psctl.job.process_messages import Register
from psctl.job.session_messages import SessionResumed
from psctl.job.silence import TOLERANCE
from psctl.job.table_server_messages import ReadBy, ReadRows, ReadWanted
from psctl.job.training_messages import Go, Heartbeat, Join, Prepare, StartBegin, StartEnd, StartPart
from psctl.types import Layout, Member, TensorSlice
from tests.helpers.permit_checks import PermitChecks

W0, W1, W2, S0 = Member("worker", 0), Member("worker", 1), Member("worker", 2), Member("server", 0)
SLICE = TensorSlice("param/w", "float32", (4,), 0, 4)


class FakePeer:
    """A peer that keeps what it is sent."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.sent: queue.SimpleQueue[tuple[Any, bytes]] = queue.SimpleQueue()
        self.tolerated, self.silence = 5.0, 0.0

    def send(self, message: Any, payload: Any = None, *, urgent: bool = False) -> bool:
        self.sent.put((message, bytes(payload) if payload is not None else b""))
        return True

    def pending(self) -> int:
        return 0

    def tolerate(self, silence: float) -> None:
        self.tolerated = silence

    def silent_for(self) -> float:
        return self.silence

    def all(self) -> list[tuple[Any, bytes]]:
        return [self.sent.get() for _ in range(self.sent.qsize())]


class FakeSaver:
    """A saver that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.interrupted: list[tuple[str, int]] = []

    def begin(self, source: str, message: SaveBegin) -> None:
        self.calls.append((source, "begin", message.slices))

    def part(self, source: str, message: SavePart, payload: memoryview) -> None:
        self.calls.append((source, "part", bytes(payload)))

    def end(self, source: str, step: int) -> None:
        self.calls.append((source, "end", step))

    def interrupt(self, source: str, step: int) -> None:
        self.interrupted.append((source, step))


class Scene:
    """The connections of three workers."""

    def __init__(self, resume: Path | None = None) -> None:
        self.heard: list[Any] = []
        self.refusal = ""
        self.saver = FakeSaver()
        saver: Any = self.saver
        self.sessions = MemberSessions()
        self.behind = CoordinatorConnections(
            self.heard.append, saver, self.sessions, lambda message: message, resume, self._why_refused
        )
        self.handler: Any = PermitChecks(COORDINATION, "coordinator", self.behind)
        self.peers = {member: self.join(FakePeer(member)) for member in (W0, W1, W2)}
        self.heard.clear()

    def join(self, peer: FakePeer) -> FakePeer:
        """Connect a member, as far as its first messages."""
        self.handler.on_connected(peer)
        first = Register() if peer.member.role == "agent" else Join(1)
        self.handler.on_message(peer, first, None)
        self.behind.start_session(peer.member, new=self.sessions.on_input(MessageReceived(peer.member, first)))
        if peer.member.role == "worker":
            self.handler.on_message(peer, Prepare(Layout((), "", ()), ()), None)
        return peer

    def tell(self, member: Member, message: Any) -> None:
        """Send a message as the state machine does."""
        self.sessions.on_instruction(SendMessage(member, message))
        self.behind.send(member, message)

    def receive(self, peer: FakePeer, message: Any, payload: memoryview | None) -> None:
        """Bring a message as net does: a payload is placed first."""
        if payload is not None:
            self.handler.receive_buffer_for(peer, message, len(payload))
        self.handler.on_message(peer, message, payload)

    def _why_refused(self, member: Member, message: Any) -> str:
        return self.refusal


def test_connections_outlast_an_outage_and_silent_agents_are_known() -> None:
    scene = Scene()
    agents = [scene.join(FakePeer(Member("agent", host))) for host in range(3)]
    assert {peer.tolerated for peer in [*agents, *scene.peers.values()]} == {TOLERANCE}
    agents[1].silence, agents[2].silence = 0.5, 4.0
    scene.peers[W0].silence = 100.0
    assert scene.behind.agents_silent_for() == {0: 0.0, 1: 0.5, 2: 4.0}


def test_what_needs_thought_goes_to_the_machine_in_order() -> None:
    scene = Scene()
    scene.handler.on_message(scene.peers[W1], Heartbeat(3, "compute"), None)
    scene.handler.on_connection_lost(scene.peers[W1], PeerLost("gone"))
    assert scene.heard == [MessageReceived(W1, Heartbeat(3, "compute")), ConnectionLost(W1, "gone")]
    scene.tell(W1, Go())
    scene.tell(W0, Go())
    assert scene.peers[W1].all() == []
    assert scene.peers[W0].all() == [(Go(), b"")]


def test_an_older_connection_of_a_member_that_came_again_does_not_count() -> None:
    scene = Scene()
    newer = FakePeer(W1)
    scene.join(newer)
    scene.handler.on_connection_lost(scene.peers[W1], PeerLost("gone"))
    assert not [each for each in scene.heard if isinstance(each, ConnectionLost)]
    scene.tell(W1, Go())
    assert newer.all() == [(Go(), b"")]


def test_parts_of_checkpoints_go_to_the_saver_and_only_their_ends_to_the_state_machine() -> None:
    scene = Scene()
    zero = scene.peers[W0]
    scene.handler.on_message(zero, SaveBegin(5, [SLICE], {"a": 1}), None)
    scene.receive(zero, SavePart(5, 0, 0), memoryview(b"1234"))
    scene.handler.on_message(zero, SaveEnd(5), None)
    assert scene.saver.calls == [
        ("worker/0", "begin", [SLICE]), ("worker/0", "part", b"1234"), ("worker/0", "end", 5),
    ]  # fmt: skip
    assert scene.heard == [MessageReceived(W0, SaveBegin(5, [])), MessageReceived(W0, SaveEnd(5))]


def test_start_values_go_from_worker_0_only_to_every_other_worker() -> None:
    scene = Scene()
    server = FakePeer(S0)
    scene.join(server)
    lent = bytearray(b"values")
    for message, payload in ((StartBegin([SLICE]), None), (StartPart(0, 0), memoryview(lent)), (StartEnd(), None)):
        scene.receive(scene.peers[W0], message, payload)
        with pytest.raises(MessageRefused, match="is for worker/0 to send"):
            scene.receive(scene.peers[W1], message, payload)
    lent[:] = b"reused"
    expected = [(StartBegin([SLICE]), b""), (StartPart(0, 0), b"values"), (StartEnd(), b"")]
    assert scene.peers[W1].all() == scene.peers[W2].all() == expected
    assert scene.peers[W0].all() == server.all() == []


def test_wanted_slices_are_read_from_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "digits-3" / "0000000005"
    writer = CheckpointWriter(folder, "digits-3", 5)
    writer.open_file("worker/0", [SLICE])
    writer.write_part("worker/0", 0, 0, bytes(range(16)))
    writer.finish_file("worker/0")
    writer.commit(
        time=1.0, world=1, servers=0, strategy="native", update="worker", seed=0, epoch=0, state={}, metrics={},
        code_hash="c", job_file="",
    )  # fmt: skip
    scene = Scene(folder)
    zero = scene.peers[W0]
    scene.handler.on_message(zero, LoadWanted(1, [TensorSlice("param/w", "float32", (4,), 1, 3)]), None)
    assert zero.sent.get(timeout=10) == (LoadPart(1, 0, 0), bytes(range(4, 12)))
    assert zero.sent.get(timeout=10) == (LoadEnd(1), b"")
    scene.handler.on_message(zero, LoadWanted(2, [TensorSlice("param/v", "float32", (4,), 0, 4)]), None)
    end, _ = zero.sent.get(timeout=10)
    assert isinstance(end, LoadEnd)
    assert "no tensor param/v" in end.problem


def test_a_job_that_begins_anew_has_nothing_to_load() -> None:
    scene = Scene()
    scene.handler.on_message(scene.peers[W0], LoadWanted(1, [SLICE]), None)
    end, _ = scene.peers[W0].sent.get(timeout=10)
    assert end == LoadEnd(1, "the job does not resume from a checkpoint")


def test_a_readers_request_goes_to_all_servers_and_their_answers_to_its_agent() -> None:
    scene = Scene()
    members = Member("agent", 1), Member("agent", 0), S0, Member("server", 1), W0
    agent, other, one, two, worker = (FakePeer(member) for member in members)
    for peer in (agent, other, one, two, worker):
        scene.join(peer)
    scene.handler.on_message(agent, ReadWanted(7, "s", ["w"], [1]), None)
    assert [each.all() for each in (one, two)] == [[(ReadWanted(7, "s", ["w"], [1], 1), b"")]] * 2
    assert agent.all() == [(SessionResumed(None), b""), (ReadBy(7, 2), b"")]
    other.all()
    rows = ReadRows(7, 1, 0, 8, [0], ["s"], [], [])
    scene.receive(one, rows, memoryview(b"12345678"))
    assert agent.all() == [(rows, b"12345678")]
    for stranger in (worker, other):  # of those neither answers
        with pytest.raises(MessageRefused, match="ReadRows is no message"):
            scene.handler.on_message(stranger, rows, None)
    with pytest.raises(MessageRefused, match="ReadWanted is no message that a worker may send"):
        scene.handler.on_message(worker, ReadWanted(8, "s", [], []), None)
    assert [each.all() for each in (agent, other, one, two, worker)] == [[]] * 5


def refusal(scene: Scene, peer: FakePeer, message: Any, payload: memoryview | None = None) -> str:
    """Bring a message that must be refused, and what net tells of it afterwards."""
    with pytest.raises(MessageRefused) as error:
        scene.receive(peer, message, payload)
    scene.heard.clear()
    scene.handler.on_connection_lost(peer, error.value)
    assert scene.heard == [ProtocolBroken(peer.member, error.value.message)]
    return error.value.message


def test_a_worker_opens_four_parts_of_checkpoints_and_not_20000() -> None:
    scene = Scene()
    for step in range(4):
        scene.receive(scene.peers[W1], SaveBegin(step, []), None)
    assert "SaveBegin: 4 parts of checkpoints at once" in refusal(scene, scene.peers[W1], SaveBegin(4, []))
    assert len(scene.saver.calls) == 4
    assert sorted(scene.saver.interrupted) == [("worker/1", step) for step in range(4)]
    zero = scene.peers[W0]  # others go on
    for step in range(20):
        scene.receive(zero, SaveBegin(step, []), None)
        scene.receive(zero, SaveEnd(step), None)
    assert len(scene.saver.calls) == 44


def test_a_checkpoint_that_the_machine_refuses_opens_no_file() -> None:
    scene = Scene()
    scene.refusal = "step 9 of 3"
    assert "SaveBegin: step 9 of 3" in refusal(scene, scene.peers[W1], SaveBegin(5, []))
    assert scene.saver.calls == []


@pytest.mark.parametrize(
    ("message", "payload"), [(SavePart(5, 0, 0), memoryview(b"1234")), (SaveEnd(5), None), (SaveEnd(6), None)]
)
def test_parts_and_ends_without_a_beginning_are_refused(message: Any, payload: memoryview | None) -> None:
    scene = Scene()
    scene.receive(scene.peers[W0], SaveBegin(4, []), None)
    assert "whose part it has not begun" in refusal(scene, scene.peers[W0], message, payload)


def test_requests_for_tensors_are_read_by_one_thread_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psctl.coordinator.connections.WANTED", 8)
    scene = Scene()
    held = threading.Event()
    before = threading.active_count()
    one = scene.peers[W1]
    one.send = lambda message, payload=None: isinstance(message, LoadEnd) and held.wait(20)
    try:
        for ticket in range(8):
            scene.receive(one, LoadWanted(ticket, []), None)
        assert threading.active_count() == before + 1
        assert "LoadWanted: 9 requests" in refusal(scene, one, LoadWanted(9, []))
    finally:
        held.set()
