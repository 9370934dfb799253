"""The head's side of one link, with messages and a clock of the test."""

import msgspec
import pytest

from quire.launch.nodes.connected_heads import HEARTBEAT_S, SILENT_S
from quire.launch.nodes.node_link import CONNECT_S, NodeLink
from quire.protocol.process.child import Report
from quire.protocol.wire.link_messages import PROTOCOL_VERSION, Heartbeat, Refused
from quire.protocol.wire.node_messages import JoinNode, NodeInfo, WorkerReport

ADDRESS = "tcp://10.0.0.5:7100"
JOIN = JoinNode(PROTOCOL_VERSION, "1.0", "head", 7)
INFO = NodeInfo(PROTOCOL_VERSION, "1.0", "node-a", 2, 4321)


@pytest.fixture
def link() -> NodeLink:
    """A link of a node that has answered."""
    link = NodeLink(ADDRESS, JOIN, 0.0)
    assert link.due(0.0, "") == [JOIN] and link.due(0.0, "") == []
    assert link.received(INFO, 0.0) and link.info == INFO
    return link


def test_heartbeats_are_sent_to_a_node_that_has_answered(link: NodeLink) -> None:
    assert link.due(HEARTBEAT_S, "") == [Heartbeat(HEARTBEAT_S)] and link.due(HEARTBEAT_S, "") == []


def test_only_messages_about_workers_are_passed_on(link: NodeLink) -> None:
    assert not link.received(Heartbeat(0.0), 0.0) and link.received(WorkerReport(1, Report("alive")), 0.0)


def test_silence_loses_the_link(link: NodeLink) -> None:
    link.received(Heartbeat(2.0), 2.0)
    link.due(2.0 + SILENT_S, "")
    assert not link.lost
    link.due(2.1 + SILENT_S, "")
    assert link.lost == f"the node node-a ({ADDRESS}) has been silent for 3 s" and not link.is_final


def test_no_answer_is_lost_with_the_state_of_the_connection() -> None:
    link = NodeLink(ADDRESS, JOIN, 0.0)
    link.due(CONNECT_S, "no connection")
    assert not link.lost
    assert link.due(CONNECT_S + 0.1, "no connection") == []
    assert link.lost == f"the node {ADDRESS} does not answer: no connection"


def test_another_version_is_final() -> None:
    link = NodeLink(ADDRESS, JOIN, 0.0)
    assert not link.received(msgspec.structs.replace(INFO, version="0.9"), 0.0)
    assert link.is_final and "runs Quire 0.9" in link.lost and "the head 1.0" in link.lost


@pytest.mark.parametrize("is_final", [False, True])
def test_a_refusal_is_passed_on(link: NodeLink, is_final: bool) -> None:
    link.received(Refused("the node node-a stops", is_final), 0.0)
    assert link.lost == f"the node {ADDRESS} refuses: the node node-a stops" and link.is_final == is_final


def test_a_second_answer_and_a_damaged_message_lose_the_link(link: NodeLink) -> None:
    link.received(INFO, 0.0)
    assert "unexpected NodeInfo" in link.lost
    link.broken("message 3 after message 1")
    assert link.lost == f"the link to the node {ADDRESS} is broken: message 3 after message 1"
