"""The flags of each ``quire bench``: one function per benchmark, imported when that benchmark is asked for."""

import argparse
from pathlib import Path

from quire.launch.bench.peers import PEERS
from quire.launch.config.command_line import add_config_file, add_options
from quire.launch.config.options import EngineOptions


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON here")


def engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", help="random weights of a named shape, such as smollm2-135m")
    parser.add_argument("--num-requests", type=int, default=32, help="requests at once (32)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of each prompt (128)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of each answer (128)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds; the median counts (3)")
    parser.add_argument("--prompt-seed", type=int, default=0, help="random seed of the prompts (0)")
    parser.add_argument("--threads", type=int, help="for Quire and for peers (OMP_NUM_THREADS, else one per core)")
    peer = f"alternate rounds with {', '.join(PEERS)}, run by this interpreter (Quire's); may be repeated"
    parser.add_argument("--peer", action="append", metavar="NAME[=PYTHON]", help=peer)
    parser.add_argument("--peer-driver", type=Path, metavar="FILE", help="drives peers (tools/peers/engine.py)")
    dtypes = ("auto", "bfloat16", "float32")
    parser.add_argument("--peer-dtype", choices=dtypes, default="auto", help="auto: the faster on this CPU (auto)")
    _add_json(parser)
    add_config_file(parser)
    add_options(parser, EngineOptions)


def serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (http://127.0.0.1:8000)")
    parser.add_argument("--dataset", type=Path, required=True, help="JSON lines with a field input; .xz, .gz or plain")
    parser.add_argument("--num-prompts", type=int, help="use only the first N prompts")
    parser.add_argument("--concurrency", type=int, default=8, help="closed loop: answers in flight at once (8)")
    parser.add_argument("--rate", type=float, help="open loop: requests per second, Poisson; instead of --concurrency")
    parser.add_argument("--max-tokens", type=int, default=64, help="most tokens of each answer (64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature (0)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of arrivals and of the requests (0)")
    parser.add_argument("--chat", action="store_true", help="as chat messages rather than raw completions")
    parser.add_argument("--ignore-eos", action="store_true", help="make each answer --max-tokens long")
    parser.add_argument("--model", help="name to ask for (the first that the server lists)")
    parser.add_argument("--api-key", help="API key of the server; else the variable QUIRE_API_KEY")
    _add_json(parser)


def wire(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-requests", type=int, default=256, help="requests that decode (256)")
    parser.add_argument("--steps", type=int, default=1024, help="steps to record (1024)")
    _add_json(parser)


def scheduler(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sections", metavar="A,B", help="only these (all)")
    parser.add_argument("--peer", type=Path, metavar="FILE", help="interpreter that has vLLM, measured in turns")
    parser.add_argument("--peer-driver", type=Path, metavar="FILE", help="the file that drives its scheduler")
    parser.add_argument("--repeats", type=int, default=1, help="fresh processes per section; medians count (1)")
    cruise = argparse.BooleanOptionalAction
    parser.add_argument("--cruise", action=cruise, default=True, help="the short way of steady decode (on)")
    _add_json(parser)


def sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="the masks are for its tokenizer (the demo's)")
    parser.add_argument("--sections", metavar="A,B", help="only these (all): worker, masks, fall, repeating")
    parser.add_argument("--rows", type=int, default=256, help="rows of the worker's batch (256)")
    parser.add_argument("--vocab-size", type=int, default=32768, help="vocabulary of the worker's logits (32768)")
    parser.add_argument("--repeats", type=int, default=20, help="steps per figure; the median counts (20)")
    shape = "random weights of a named shape, to repeat a text beside the demo; may be repeated"
    parser.add_argument("--shape", action="append", default=[], help=shape)
    parser.add_argument("--method", choices=("ngram", "suffix"), default="ngram", help="proposer of drafts (ngram)")
    parser.add_argument("--output-len", type=int, default=512, help="tokens of the repeating answer (512)")
    parser.add_argument("--rounds", type=int, default=5, help="answers by turns; the median counts (5)")
    _add_json(parser)


def kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="which kernels (auto)")
    parser.add_argument("--sections", metavar="A,B", help="only these (all of the device's)")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, less time on each")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU: only whether it all runs")
    parser.add_argument("--time-limit", type=float, metavar="S", help="begin nothing new after S seconds")
    _add_json(parser)
