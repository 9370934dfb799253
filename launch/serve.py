"""``quire serve``: runs the engine's processes and the HTTP front ends until a signal."""

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import msgspec

from quire.frontend.adapters.names import NamedAdapter, NameTable, table_path
from quire.frontend.network_options import check_network
from quire.frontend.serve_options import ServeOptions
from quire.launch.config.api_keys import read_admin_keys, read_api_keys
from quire.launch.config.declared import check_ranges
from quire.launch.config.engine_config import with_api_keys
from quire.launch.config.observability import check_metrics_prefix, check_tracing
from quire.launch.fleet.engine_settings import check_shared, router_config
from quire.launch.fleet.fleet import Fleet
from quire.launch.fleet.places import LocalPlaces, OwnedPlaces, Places
from quire.launch.listener import Listener
from quire.launch.nodes.sources import RAY, check_nodes, parse_sources
from quire.launch.supervision.supervisor import REAL_WORKER, FrontEndModule, Supervisor, WorkerModule
from quire.protocol.config import EngineConfig
from quire.protocol.errors import counted
from quire.protocol.model.gguf_file import is_gguf
from quire.protocol.process.log import write_line
from quire.protocol.process.signals import IGNORED_SIGNALS, STOP_SIGNALS
from quire.version import __version__

SAME_SIGNAL_S = 1.0
PROGRESS_S = 4.0
"""Seconds between two lines about a start that takes longer."""


class Signals:
    """Counts STOP_SIGNALS and wakes the supervisor: the first drains, the second stops at once.

    What follows within SAME_SIGNAL_S is the same signal: ``timeout`` sends one to its child, and one to the group.

    SIGHUP stays ignored under ``nohup``. IGNORED_SIGNALS are ignored, also by children from their first instruction.
    """

    def __init__(self, processes: Supervisor | Fleet, now: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._now, self._counted = now, -math.inf
        signal.set_wakeup_fd(processes.wakeup_fd)
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        for number in IGNORED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._now() - self._counted >= SAME_SIGNAL_S:
            self.count, self._counted = self.count + 1, self._now()


def check_options(options: ServeOptions) -> None:
    """Raise ConfigError for a setting of the front ends that cannot be used, before the model is read."""
    check_ranges(options)
    check_network(options)
    check_metrics_prefix(options.metrics_prefix)
    check_tracing(options.otlp_traces_endpoint)


def serve(config: EngineConfig, options: ServeOptions, model_name: str, worker: WorkerModule = REAL_WORKER) -> None:
    """Serve with checked options until one of STOP_SIGNALS. A second signal stops at once.

    Raises:
        ConfigError: a setting cannot be used, the address is in use, or a child refused its settings or checkpoint.
        EngineError: the engine cannot continue, with the reason.
    """
    started = time.monotonic()
    check_nodes(config, options, simulated=worker is not REAL_WORKER)
    keys = read_api_keys(options)
    config = with_api_keys(config, keys)
    options = msgspec.structs.replace(
        options,
        served_model_name=options.served_model_name or [model_name],
        api_key=keys,
        admin_api_key=read_admin_keys(options, keys),
    )
    adapters = server_adapters(config, options)  # before there is a file or a process: a signal then ends the start
    with Listener(options) as listener:
        fd = listener.socket.fileno()
        front_end = FrontEndModule("quire.frontend.http", options.api_server_count, ("--listen-fd", str(fd)), (fd,))
        about = f"{model_name} on {listener.address}"
        if options.data_parallel_size > 1 or options.nodes:
            with contextlib.closing(_open_places(config, options)) as places:
                by_contents = config.enable_prefix_caching and options.routing == "cache"
                config = msgspec.structs.replace(config, head_key_file=places.head_key_file, feeds_router=by_contents)
                with _make_fleet(config, options, places, worker, front_end) as fleet:
                    _run(fleet, config, options, adapters, about, started)
            return
        with Supervisor(
            config,
            worker=worker,
            front_end=front_end,
            standby=options.standby_workers,
            environment=options.logs.environment,
        ) as supervisor:
            _run(supervisor, config, options, adapters, about, started)


def _open_places(config: EngineConfig, options: ServeOptions) -> OwnedPlaces:
    """Connect to the nodes, if there are any."""
    size = config.tensor_parallel_size
    if not options.nodes:
        return LocalPlaces(size)
    if options.nodes == [RAY]:
        from quire.launch.nodes.ray_cluster import RayCluster  # pyzmq, which --help does not wait for
        from quire.launch.nodes.ray_places import RayPlaces

        return RayPlaces(RayCluster("CPU" if config.device == "cpu" else "GPU"), size, options.data_parallel_size)
    from quire.launch.nodes.node_places import NodePlaces

    return NodePlaces(parse_sources(options.nodes), Path(options.node_keys), size)


def _make_fleet(
    config: EngineConfig, options: ServeOptions, places: Places, worker: WorkerModule, front_end: FrontEndModule
) -> Fleet:
    check_shared(config, options.data_parallel_size, uses_nodes=bool(options.nodes))
    return Fleet(
        config,
        router_config(config, options),
        options.data_parallel_size,
        places=places,
        worker=worker,
        front_end=front_end,
        standby=options.standby_workers,
        drain_timeout=options.drain_timeout,
        log=options.logs,
    )


def _run(
    processes: Supervisor | Fleet,
    config: EngineConfig,
    options: ServeOptions,
    adapters: Sequence[NamedAdapter],
    about: str,
    started: float,
) -> None:
    signals = Signals(processes)
    write_settings(processes.directory, options, adapters)
    _say(options, f"starting {about}")
    processes.start_all()
    said_at = started
    while not processes.is_ready and not signals.count:
        processes.watch(1.0)
        now = time.monotonic()
        has_bar = "loads weights" in processes.awaited and sys.stderr.isatty()
        if now > said_at + PROGRESS_S and not has_bar:
            said_at = now
            _say(options, f"starting for {now - started:.0f} s: {processes.awaited}")
    if not processes.is_ready:  # no request runs; a process that loads or compiles would see a command late
        processes.kill_all()
        return
    if not signals.count:
        if config.sampling_defaults:
            values = " ".join(f"{name}={value:g}" for name, value in config.sampling_defaults.items())
            write_line(f"sampling defaults of the model: {values} (--generation-config vllm: none)")
        seconds, engines = time.monotonic() - started, ""
        if isinstance(processes, Fleet):
            for slot in processes.slots:
                write_line(f"engine {slot.number}: {slot.detail or _kv_cache_line(config, slot.ready_report.detail)}")
            engines = f", {counted(len(processes.slots), 'engine')}"
        else:
            write_line(_kv_cache_line(config, processes.policy.ready_report.detail))
        write_line(f"Quire {__version__} serves {about} (ready in {seconds:.1f} s{engines})")
    while not signals.count:
        processes.watch(None)
    write_line(
        f"stopping: running requests have {options.shutdown_timeout:g} s to finish; a second signal stops at once"
    )
    deadline = time.monotonic() + options.shutdown_timeout + 5
    processes.drain()
    while processes.has_front_ends() and signals.count < 2 and time.monotonic() < deadline:
        processes.watch(0.5)
    if signals.count >= 2:
        processes.kill_all()


def _say(options: ServeOptions, text: str) -> None:
    """Write a line about the start, unless a log level asks for less."""
    if options.logs.level not in ("WARNING", "ERROR"):
        write_line(text)


def _kv_cache_line(config: EngineConfig, detail: dict[str, float]) -> str:
    size = f"{detail.get('kv_cache_bytes', 0) / 2**30:.2f} GiB{' per worker' * (config.tensor_parallel_size > 1)}"
    slots = f", and {detail['state_slots']:.0f} slots of states" if detail.get("state_slots") else ""
    blocks = f"{detail.get('kv_blocks', 0):.0f} blocks of {detail.get('block_size', 0):.0f} tokens"
    return f"KV cache: {size}, {blocks}{slots}"


def server_adapters(config: EngineConfig, options: ServeOptions) -> list[NamedAdapter]:
    """Return the adapters that the server has from its start; raise ConfigError as ``read_modules``."""
    from quire.launch.config.adapter_modules import read_modules  # numpy, which --help does not wait for

    return read_modules(options.lora_modules or [], config, options.served_model_name or [])


def write_settings(directory: Path, options: ServeOptions, adapters: Sequence[NamedAdapter]) -> None:
    """Write the front ends' settings to files that only this user can read, because they hold keys."""
    path = directory / "frontend"
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(options))
    NameTable(table_path(directory)).change(lambda names: names.update((each.name, each) for each in adapters))


def model_display_name(folder: Path, given: str | None) -> str:
    """Return the default served name: the id as given, the folder's or the GGUF file's name, or ``quire-demo``."""
    if is_gguf(folder):
        return folder.stem
    return "quire-demo" if given is None else given if "/" not in given or not folder.is_absolute() else folder.name
