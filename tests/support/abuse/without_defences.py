"""Defences against hostile clients, files and neighbours, each removed within a context.

``tests/test_guards.py`` names the test that fails without each.
"""

import contextlib
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import yaml
from grammar_cases import demo_backend

from quire.bench.measure import report
from quire.frontend.http.routes import generate
from quire.frontend.http.serving import gate, http_server, metrics, origins, socket_protocol
from quire.frontend.http.serving.body_budget import BodyBudget
from quire.frontend.http.serving.connections import Connections
from quire.frontend.http.serving.socket_protocol import ConnectionLimits
from quire.frontend.text import template_helper, text_in
from quire.launch import cli
from quire.launch.config import config_file
from quire.protocol.process import helper, log
from quire.protocol.process.helper import HelperDied
from quire.protocol.process.restarts import Restarts
from quire.protocol.wire import connection_limit
from quire.replay.recorded import reader
from quire.replay.run.collector import RunCollector
from quire.scheduler_proc.process.sockets import SocketFile
from quire.scheduler_proc.structured import llguidance_backend
from quire.scheduler_proc.trace import files

Patch = contextlib.AbstractContextManager[Any]


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


@contextlib.contextmanager
def in_new_processes(code: str) -> Iterator[None]:
    """Run ``code`` at the start of each Python process that starts within the context."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(code)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
            yield


def text_of_requests_is_marked() -> Patch:
    """Text of a request may become control tokens and thinking markers."""
    return mock.patch.object(text_in, "mark_special", lambda value, *_, **__: value)


def each_address_is_a_tenant() -> Patch:
    """Clients without keys share one queue."""
    return mock.patch.object(gate, "tenant_of_address", lambda client, salt: 0)


def idle_connections_make_room() -> Patch:
    """Idle connections keep their place."""
    return mock.patch.object(Connections, "set_idle", nothing)


@contextlib.contextmanager
def each_client_leaves_room_for_bodies() -> Iterator[None]:
    """All clients count as one, which may use half of the memory for bodies."""
    take, release = BodyBudget.take, BodyBudget.release
    with (
        mock.patch.object(BodyBudget, "take", lambda self, client, before, size: take(self, 0, before, size)),
        mock.patch.object(BodyBudget, "release", lambda self, client, size: release(self, 0, size)),
    ):
        yield


def host_names_are_checked() -> Patch:
    """Any name may lead to the server."""
    return mock.patch.object(origins, "PRIVATE_SUFFIXES", ("",))


def origins_are_checked() -> Patch:
    """Any web page may send requests."""
    return mock.patch.object(origins, "CHECKED", frozenset((b"host",)))


def pages_send_json_only() -> Patch:
    """A web page may send a body of any type."""
    return mock.patch.object(origins, "SAFE_METHODS", (*origins.SAFE_METHODS, "POST"))


def types_are_not_guessed() -> Patch:
    """A browser may take any response for a page."""
    return mock.patch.object(http_server, "RESPONSE_HEADERS", [])


def log_probabilities_are_limited() -> Patch:
    """A response may have any number of log probabilities."""
    return mock.patch.object(generate, "MAX_COLLECTED_VALUES", 2**62)


def several_keys_isolate_the_prefix_cache() -> Patch:
    """All API keys share the prefix cache by default."""
    real = msgspec.structs.replace

    def shared(struct: Any, **changes: Any) -> Any:
        if "isolate_prefix_cache_by_key" in changes:
            changes["isolate_prefix_cache_by_key"] = False
        return real(struct, **changes)

    return mock.patch.object(msgspec.structs, "replace", shared)


def more_signals_stop_in_order() -> Patch:
    """SIGHUP and SIGQUIT end a process."""
    return in_new_processes("from quire.protocol.process import signals; signals.STOP_SIGNALS = (2, 15)")


def other_signals_are_ignored() -> Patch:
    """SIGUSR1 and others end a process."""
    return in_new_processes("from quire.protocol.process import signals; signals.IGNORED_SIGNALS = ()")


def the_port_belongs_to_one_server() -> Patch:
    """Several servers may listen on a port, as its front ends once did."""
    return mock.patch.object(socket, "SO_REUSEADDR", socket.SO_REUSEPORT)


def trace_headers_are_checked() -> Patch:
    """A replay starts with any numbers."""
    return mock.patch.object(reader, "check_header", nothing)


def config_files_are_shallow() -> Patch:
    """Settings may be nested to any depth."""
    return mock.patch.object(config_file, "MAX_DEPTH", 10**9)


def values_of_config_files_are_plain() -> Patch:
    """Numbers of base 60, dates and merges are recognised."""
    return mock.patch.object(
        config_file.PlainLoader, "yaml_implicit_resolvers", yaml.SafeLoader.yaml_implicit_resolvers
    )


def shortages_are_named() -> Patch:
    """A start that fails for lack of a resource ends like any unexpected error."""
    return in_new_processes("from quire.protocol import errors; errors.shortage = lambda error: ''")


def keys_are_hidden() -> Patch:
    """API keys stay in the command line."""
    return in_new_processes(
        "from quire.launch.config import api_keys; api_keys.hide_in_command_line = lambda secrets: None"
    )


@contextlib.contextmanager
def names_are_escaped() -> Iterator[None]:
    """Names from outside are printed as they are."""
    with mock.patch.object(log, "one_line", str), mock.patch.object(cli, "one_line", str):
        yield


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


@contextlib.contextmanager
def objects_may_have_many_optional_properties() -> Iterator[None]:
    """Accepted objects may exceed the parser's limit, which was once as low."""
    demo_backend.cache_clear()
    try:
        with mock.patch.object(llguidance_backend, "MAX_ROW_ITEMS", 1000):
            yield
    finally:
        demo_backend.cache_clear()


def restarts_are_those_of_the_supervisor() -> Patch:
    """Restarts are not counted beyond the life of a process."""
    return mock.patch.object(metrics, "read_restarts", lambda directory: Restarts())


def the_supervisor_publishes_restarts() -> Patch:
    """The supervisor keeps its counts for itself."""
    return in_new_processes("from quire.protocol.process import restarts; restarts.write_restarts = lambda *_: None")


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


def the_recipe_keeps_secrets_private() -> Patch:
    """The documented recipe writes files with the usual umask."""
    real = Path.read_text
    return mock.patch.object(
        Path, "read_text", lambda self, *args, **kwargs: real(self, *args, **kwargs).replace("os.umask(0o077)", "pass")
    )


def ambiguous_heads_are_refused() -> Patch:
    """Every head that the parser accepts is served."""
    return mock.patch.object(socket_protocol, "check_head", nothing)


def upgrades_are_ignored() -> Patch:
    """Every request that asks for another protocol ends HTTP, as for a web socket."""
    return mock.patch.object(socket_protocol, "is_handshake", lambda *head: True)


def pipelined_requests_are_limited() -> Patch:
    """Any number of requests may wait on one connection."""
    return mock.patch.dict(ConnectionLimits.__init__.__kwdefaults__ or {}, num_pipelined=10**6)


def a_dash_is_standard_output() -> Patch:
    """``--json -`` of a benchmark names a file."""
    return mock.patch.object(report, "STDOUT", Path("stdout"))


Defence = Callable[[], Patch]


class Row(NamedTuple):
    """``test`` must fail without ``defence``; of a parametrized test, at least one case.

    Attributes:
        finding: number in ``tests/abuse/findings.md``.
        is_long: the test starts servers or waits for seconds, so this row never runs in ``make test``.
    """

    finding: int
    defence: Defence
    test: str
    is_long: bool = False


DEFENCES = (
    Row(1, text_of_requests_is_marked, "frontend/text/test_control_text.py::test_messages_open_no_thinking_span"),
    Row(2, text_of_requests_is_marked, "frontend/text/test_control_text.py::test_no_control_token"),
    Row(4, each_address_is_a_tenant, "abuse/test_routes.py::TestKeys::test_without_keys_each_address_is_a_tenant"),
    Row(5, idle_connections_make_room, "abuse/test_overload.py::TestConnections::test_idle_connections_make_room"),
    Row(
        5,
        each_client_leaves_room_for_bodies,
        "abuse/test_overload.py::TestBodies::test_small_bodies_do_not_wait_for_large_ones",
    ),
    Row(6, host_names_are_checked, "frontend/http/test_origins.py::TestHost::test_a_public_name_is_refused"),
    Row(
        6,
        origins_are_checked,
        "frontend/http/test_origins.py::TestOrigin::test_a_page_cannot_use_the_server_by_default",
    ),
    Row(6, pages_send_json_only, "frontend/http/test_origins.py::TestOrigin::test_an_allowed_page_needs_json"),
    Row(6, types_are_not_guessed, "frontend/http/test_origins.py::test_browsers_must_not_guess_types"),
    Row(
        7,
        log_probabilities_are_limited,
        "abuse/test_overload.py::TestCollectedOutput::"
        "test_too_many_prompt_logprobs_are_refused_before_they_are_computed",
        is_long=True,
    ),
    Row(
        8,
        several_keys_isolate_the_prefix_cache,
        "launch/config/test_priority_range.py::test_api_keys_set_a_default_range",
    ),
    Row(
        9,
        more_signals_stop_in_order,
        "end_to_end/test_server.py::TestCommandLine::test_signals_to_all_processes_stop_the_server_in_order_or_not_at_all",
        is_long=True,
    ),
    Row(
        9,
        other_signals_are_ignored,
        "end_to_end/test_server.py::TestCommandLine::test_signals_to_all_processes_stop_the_server_in_order_or_not_at_all",
        is_long=True,
    ),
    Row(
        10,
        the_port_belongs_to_one_server,
        "launch/test_listener.py::TestPort::test_no_other_socket_can_listen_on_the_port",
    ),
    Row(11, trace_headers_are_checked, "abuse/test_trace_files.py::test_command_reports_a_damaged_header_in_one_line"),
    Row(12, config_files_are_shallow, "launch/config/test_config_file.py::test_other_files_are_refused_soon"),
    Row(12, values_of_config_files_are_plain, "launch/config/test_config_file.py::test_values_are_what_they_look_like"),
    Row(13, shortages_are_named, "abuse/test_starts.py::test_limits_are_named", is_long=True),
    Row(14, keys_are_hidden, "launch/test_listener.py::TestKeys::test_keys_do_not_show_in_the_command_line"),
    Row(15, names_are_escaped, "abuse/test_starts.py::test_names_are_printed_without_control_characters"),
    Row(16, socket_files_are_reclaimed, "scheduler_proc/process/test_sockets.py::test_socket_file_is_restored"),
    Row(17, stopped_helpers_are_found, "abuse/test_templates.py::test_stopped_helper_is_replaced"),
    Row(
        17,
        crashed_helpers_are_tried_once_more,
        "abuse/test_templates.py::test_helper_that_ends_while_it_renders_is_tried_once_more",
    ),
    Row(
        18,
        traces_continue_in_the_next_part,
        "scheduler_proc/trace/test_trace_writer.py::test_a_restarted_scheduler_begins_the_next_part",
    ),
    Row(
        18,
        resubmitted_requests_are_one_request,
        "replay/recorded/test_restarts.py::test_a_request_of_both_schedulers_is_one_request",
    ),
    Row(
        19,
        objects_may_have_many_optional_properties,
        "scheduler_proc/structured/test_llguidance.py::test_objects_of_many_optional_properties_can_be_written",
    ),
    Row(
        20,
        excess_connections_are_closed,
        "abuse/test_curve.py::test_connections_without_a_key_are_limited",
        is_long=True,
    ),
    Row(
        21,
        restarts_are_those_of_the_supervisor,
        "frontend/http/test_metrics.py::test_restarts_of_processes_are_those_of_the_supervisor",
    ),
    Row(
        21,
        the_supervisor_publishes_restarts,
        "end_to_end/test_recovery.py::TestMetrics::test_every_front_end_has_the_sums_and_no_count_falls",
        is_long=True,
    ),
    Row(22, token_ids_are_checked, "abuse/test_tokenizers.py::test_huge_token_id_is_refused"),
    Row(
        22,
        tokenizers_are_tried_out,
        "abuse/test_tokenizers.py::test_tokenizer_that_is_slow_for_ordinary_text_is_refused",
    ),
    Row(23, the_recipe_keeps_secrets_private, "abuse/test_curve.py::test_documented_recipe_makes_valid_keys"),
    Row(
        24,
        ambiguous_heads_are_refused,
        "abuse/test_connections.py::TestHeads::test_ambiguous_head_is_refused",
        is_long=True,
    ),
    Row(
        25,
        upgrades_are_ignored,
        "frontend/http/test_request_heads.py::test_a_body_belongs_to_the_request_that_announces_it",
        is_long=True,
    ),
    Row(
        24,
        pipelined_requests_are_limited,
        "abuse/test_connections.py::TestHeads::test_one_pipelined_request_too_many_is_refused",
        is_long=True,
    ),
    Row(
        24,
        a_dash_is_standard_output,
        "bench/test_bench_report.py::TestReport::test_a_dash_prints_the_json_alone",
    ),
)
