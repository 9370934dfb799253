"""Defences against hostile clients, files and neighbours, each removed within a context.

``tests/test_guards.py`` names the test that fails without each.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from quire.launch.config import config_file
from quire.launch.http.routes import generate
from quire.launch.http.serving import gate, origins
from quire.launch.http.serving.connections import Connections
from quire.launch.replay.recorded import reader
from quire.launch.replay.run.collector import RunCollector
from quire.launch.text import template_helper, text_in
from quire.protocol.process import helper
from quire.protocol.process.helper import HelperDied
from quire.protocol.wire import connection_limit
from quire.scheduler_proc.process.sockets import SocketFile
from quire.scheduler_proc.trace import files

Patch = contextlib.AbstractContextManager[Any]


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


def text_of_requests_is_marked() -> Patch:
    """Text of a request may become control tokens and thinking markers."""
    return mock.patch.object(text_in, "mark_special", lambda value, pattern: value)


def each_address_is_a_tenant() -> Patch:
    """Clients without keys share one queue."""
    return mock.patch.object(gate, "tenant_of_address", lambda client, salt: 0)


def idle_connections_make_room() -> Patch:
    """Idle connections keep their place."""
    return mock.patch.object(Connections, "set_idle", nothing)


def host_names_are_checked() -> Patch:
    """Any name may lead to the server."""
    return mock.patch.object(origins, "PRIVATE_SUFFIXES", ("",))


def log_probabilities_are_limited() -> Patch:
    """A response may have any number of log probabilities."""
    return mock.patch.object(generate, "MAX_COLLECTED_VALUES", 2**62)


def trace_headers_are_checked() -> Patch:
    """A replay starts with any numbers."""
    return mock.patch.object(reader, "check_header", nothing)


def config_files_are_shallow() -> Patch:
    """Settings may be nested to any depth."""
    return mock.patch.object(config_file, "MAX_DEPTH", 10**9)


def socket_files_are_reclaimed() -> Patch:
    """A socket whose file was replaced is not bound again."""
    return mock.patch.object(SocketFile, "reclaim", nothing)


@contextlib.contextmanager
def stopped_helpers_are_found() -> Iterator[None]:
    """A stopped helper is waited for like a busy one."""
    with (
        mock.patch.object(helper, "is_stopped", lambda pid: False),
        mock.patch.object(template_helper, "WALL_SECONDS", 0.5),
    ):
        yield


def crashed_helpers_are_tried_once_more() -> Patch:
    """A crash is the fault of the question."""
    return mock.patch.object(HelperDied, "took_too_long", True)


def traces_continue_in_the_next_part() -> Patch:
    """A restarted scheduler empties the first part."""
    real = files.open_private
    return mock.patch.object(files, "open_private", lambda path: real(path.with_name(re.sub(r"\.\d+$", "", path.name))))


def resubmitted_requests_are_one_request() -> Patch:
    """A replay counts a request once per scheduler."""
    return mock.patch.object(RunCollector, "restarted", nothing)


def excess_connections_are_closed() -> Patch:
    """Peers without a key keep any number of connections."""
    return mock.patch.object(connection_limit, "close_connection", nothing)


def token_ids_are_checked() -> Patch:
    """A vocabulary may have any ids."""
    return mock.patch.object(text_in, "check_token_ids", nothing)


def tokenizers_are_tried_out() -> Patch:
    """A tokenizer may take any time."""
    return mock.patch.object(text_in, "check_speed", nothing)


Defence = Callable[[], Patch]

DEFENCES: tuple[tuple[Defence, str], ...] = (
    (text_of_requests_is_marked, "launch/text/test_control_text.py::test_messages_open_no_thinking_span"),
    (text_of_requests_is_marked, "launch/text/test_control_text.py::test_no_control_token"),
    (each_address_is_a_tenant, "abuse/test_routes.py::TestKeys::test_without_keys_each_address_is_a_tenant"),
    (idle_connections_make_room, "abuse/test_overload.py::TestConnections::test_idle_connections_make_room"),
    (
        log_probabilities_are_limited,
        "abuse/test_overload.py::TestCollectedOutput::"
        "test_too_many_prompt_logprobs_are_refused_before_they_are_computed",
    ),
    (host_names_are_checked, "launch/http/test_origins.py::TestHost::test_a_public_name_is_refused"),
    (trace_headers_are_checked, "abuse/test_trace_files.py::test_command_reports_a_damaged_header_in_one_line"),
    (config_files_are_shallow, "launch/config/test_config_file.py::test_other_files_are_refused_soon"),
    (socket_files_are_reclaimed, "scheduler_proc/process/test_sockets.py::test_socket_file_is_restored"),
    (stopped_helpers_are_found, "abuse/test_templates.py::test_stopped_helper_is_replaced"),
    (
        crashed_helpers_are_tried_once_more,
        "abuse/test_templates.py::test_helper_that_ends_while_it_renders_is_tried_once_more",
    ),
    (
        traces_continue_in_the_next_part,
        "scheduler_proc/trace/test_trace_writer.py::test_a_restarted_scheduler_begins_the_next_part",
    ),
    (
        resubmitted_requests_are_one_request,
        "launch/replay/recorded/test_restarts.py::test_a_request_of_both_schedulers_is_one_request",
    ),
    (excess_connections_are_closed, "abuse/test_curve.py::test_connections_without_a_key_are_limited"),
    (token_ids_are_checked, "abuse/test_tokenizers.py::test_huge_token_id_is_refused"),
    (tokenizers_are_tried_out, "abuse/test_tokenizers.py::test_tokenizer_that_is_slow_for_ordinary_text_is_refused"),
)
"""(what is removed, the test that must fail then; of a parametrized one, at least one case)."""
