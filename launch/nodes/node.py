"""``quire node``: its flags, and the number of devices of this machine."""

import argparse
import os
import sys
from pathlib import Path

from quire.launch.nodes.addresses import parse_address
from quire.protocol.errors import ConfigError, counted
from quire.protocol.process.log import start_logging, write_line
from quire.version import __version__

GPUS = Path("/proc/driver/nvidia/gpus")
KEYS_FLAG = "--keys"
DEVICES = range(1, 1025)


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", metavar="ADDRESS", help="where heads connect, such as tcp://10.0.0.5:7100")
    parser.add_argument(
        "--keys", type=Path, metavar="DIR", help="folder of mode 0700 with server.key_secret and allowed/NAME.key"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="workers at once (the number of GPUs, or 1)")
    parser.add_argument("--stop-with-stdin", action="store_true", help="stop when standard input ends")
    parser.add_argument(
        "--make-keys", type=Path, metavar="DIR", help="write new keys to DIR/node (--keys) and DIR/head (--node-keys)"
    )


def run(args: argparse.Namespace) -> None:
    """Run the command ``quire node``. Raises ConfigError for flags that cannot be used."""
    # Imported here: pyzmq, which --help does not wait for.
    from quire.launch.nodes.agent import Agent
    from quire.launch.nodes.keys import make_keys
    from quire.protocol.wire.curve_keys import load_curve_keys

    start_logging()
    if args.make_keys is not None:
        node, head = make_keys(args.make_keys)
        write_line(f"wrote {node} for `quire node --keys`, and {head} for `quire serve --node-keys`")
        return
    if not args.listen or args.keys is None:
        raise ConfigError("quire node needs --listen tcp://ADDRESS:PORT and --keys DIR (--make-keys DIR makes keys)")
    parse_address(args.listen, "--listen")
    devices = num_devices() if args.devices is None else args.devices
    if devices not in DEVICES:
        raise ConfigError(f"--devices must be between {DEVICES[0]} and {DEVICES[-1]} (got {devices})")
    agent = Agent(args.listen, load_curve_keys(args.keys, KEYS_FLAG), devices)
    write_line(f"Quire {__version__} runs up to {counted(devices, 'worker')} for heads that connect to {args.listen}")
    try:
        agent.run(stdin=sys.stdin.fileno() if args.stop_with_stdin else None)
    finally:
        agent.close()


def num_devices() -> int:
    """Return the number of this machine's GPUs that ``CUDA_VISIBLE_DEVICES`` shows; without one, 1 for the CPU."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return len(visible.split(","))
    return max(1, len(list(GPUS.iterdir()) if GPUS.is_dir() else []))
