"""Flags of ``quire bench``, one function per benchmark."""

import argparse
from pathlib import Path

from quire.bench.peers import PEERS
from quire.launch.config.command_line import add_engine_options


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON line to FILE; -: print it alone")


def engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", metavar="NAME", help="model shape with random weights, such as smollm2-135m")
    parser.add_argument("--num-requests", type=int, metavar="N", default=32, help="concurrent requests (32)")
    parser.add_argument("--input-len", type=int, metavar="N", default=128, help="tokens per prompt (128)")
    parser.add_argument("--output-len", type=int, metavar="N", default=128, help="output tokens per request (128)")
    parser.add_argument("--rounds", type=int, metavar="N", default=3, help="timed rounds, reported as median (3)")
    parser.add_argument("--prompt-seed", type=int, metavar="N", default=0, help="random seed for the prompts (0)")
    threads = "compute threads of Quire and of each peer (OMP_NUM_THREADS, or one per core)"
    parser.add_argument("--threads", type=int, metavar="N", help=threads)
    choices = ", ".join(":".join((name, "|".join(weights))).rstrip(":") for name, weights in PEERS.items())
    peer = f"engine to alternate rounds with: {choices}; PYTHON: its interpreter (Quire's); repeatable"
    parser.add_argument("--peer", action="append", metavar="NAME[:WEIGHTS][=PYTHON]", help=peer)
    files = "folder of the checkpoints that are written for peers, and used again (a temporary one)"
    parser.add_argument("--peer-files", type=Path, metavar="DIR", help=files)
    exporter = "interpreter with optimum-intel, which converts checkpoints for openvino (the peer's)"
    parser.add_argument("--openvino-exporter", metavar="PYTHON", help=exporter)
    gguf = "have Quire load the checkpoint as a GGUF file of this type, the one that llamacpp:TYPE loads"
    parser.add_argument("--gguf", choices=PEERS["llamacpp"], help=gguf)
    adapters = "repeat each round with N random LoRA adapters, of which each request has one in turn (0)"
    parser.add_argument("--adapters", type=int, metavar="N", default=0, help=adapters)
    parser.add_argument("--adapter-rank", type=int, metavar="R", default=16, help="rank of these adapters (16)")
    busy = "after each timed round, repeat it with N busy processes beside it (0)"
    parser.add_argument("--busy", type=int, metavar="N", default=0, help=busy)
    parser.add_argument("--peer-driver", type=Path, metavar="FILE", help="driver of the peers (tools/peers/engine.py)")
    dtypes = ("auto", "bfloat16", "float32")
    dtype = "dtype of the peers; auto: the faster one on this CPU (auto)"
    parser.add_argument("--peer-dtype", choices=dtypes, default="auto", help=dtype)
    _add_json(parser)
    add_engine_options(parser)


def embed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", metavar="NAME", help="encoder shape with random weights: bge-base or bge-small")
    parser.add_argument("--num-texts", type=int, metavar="N", default=64, help="texts in a round (64)")
    parser.add_argument("--input-len", type=int, metavar="N", default=128, help="tokens per text (128)")
    parser.add_argument("--rounds", type=int, metavar="N", default=3, help="timed rounds (3)")
    parser.add_argument("--prompt-seed", type=int, metavar="N", default=0, help="random seed for the texts (0)")
    threads = "compute threads of Quire and of the peer (OMP_NUM_THREADS, or one per core)"
    parser.add_argument("--threads", type=int, metavar="N", help=threads)
    against = "alternate rounds with sentence-transformers; PYTHON: its interpreter (Quire's)"
    parser.add_argument("--against", metavar="sentence-transformers[=PYTHON]", help=against)
    _add_json(parser)
    add_engine_options(parser)


def serve(parser: argparse.ArgumentParser) -> None:
    url = "http://127.0.0.1:8000"
    parser.add_argument("--url", default=url, metavar="URL", help=f"address of the server ({url})")
    dataset = "random prompts, or JSON lines with a field input or prompt; plain, .xz or .gz (random)"
    parser.add_argument("--dataset", metavar="FILE|random", default="random", help=dataset)
    parser.add_argument("--num-prompts", type=int, metavar="N", help="prompts to send (random: 100; FILE: all)")
    parser.add_argument("--input-len", type=int, metavar="N", help="tokens per prompt (random: 512; FILE: no limit)")
    concurrency = "closed loop: number of clients with one request each (8)"
    parser.add_argument("--concurrency", type=int, metavar="N", default=8, help=concurrency)
    rate = "open loop instead of --concurrency: requests per second, Poisson arrivals"
    parser.add_argument("--rate", type=float, metavar="RATE", help=rate)
    parser.add_argument("--max-tokens", type=int, metavar="N", default=64, help="most output tokens per request (64)")
    parser.add_argument("--temperature", type=float, metavar="T", default=0.0, help="sampling temperature (0)")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="random seed for arrivals and sampling (0)")
    parser.add_argument("--chat", action="store_true", help="send chat messages instead of raw completions")
    parser.add_argument("--ignore-eos", action="store_true", help="generate exactly --max-tokens per request")
    parser.add_argument("--model", metavar="MODEL", help="served model name to request (first one listed)")
    parser.add_argument("--api-key", metavar="KEY", help="API key for the server (environment QUIRE_API_KEY)")
    _add_json(parser)


def beams(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", metavar="NAME", help="model shape with random weights, such as smollm2-135m")
    parser.add_argument("--beam-width", type=int, metavar="N", default=8, help="beams of each search (8)")
    parser.add_argument("--num-prompts", type=int, metavar="N", default=1, help="searches at once (1)")
    parser.add_argument("--input-len", type=int, metavar="N", default=128, help="tokens per prompt (128)")
    parser.add_argument("--output-len", type=int, metavar="N", default=64, help="tokens per output (64)")
    parser.add_argument("--rounds", type=int, metavar="N", default=5, help="timed rounds, reported as median (5)")
    _add_json(parser)
    add_engine_options(parser)


def pins(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="trace with conversations and their pauses, as of quire replay")
    cost = "roofline:llama-3.1-8b,h200"
    parser.add_argument("--cost", metavar="SPEC", default=cost, help=f"seconds of prefill, as of quire replay ({cost})")
    parser.add_argument("--num-usable-blocks", type=int, metavar="N", default=15_000, help="blocks of the pool (15000)")
    parser.add_argument("--block-size", type=int, metavar="N", default=64, help="tokens of a block (64)")
    stagger = "seconds between the starts of conversations that have no common clock (60)"
    parser.add_argument("--stagger", type=float, metavar="S", default=60.0, help=stagger)
    _add_json(parser)


def wire(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-requests", type=int, metavar="N", default=256, help="decoding requests (256)")
    parser.add_argument("--steps", type=int, metavar="N", default=1024, help="steps to record (1024)")
    _add_json(parser)


def router(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", type=int, metavar="N", default=4, help="engines (4)")
    parser.add_argument(
        "--blocks", type=int, metavar="N", default=100_000, help="cached blocks of each engine (100000)"
    )
    parser.add_argument("--requests", type=int, metavar="N", default=1000, help="requests of each length (1000)")
    parser.add_argument("--events", type=int, metavar="N", default=200_000, help="events to follow (200000)")
    _add_json(parser)


def scheduler(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sections", metavar="A,B", help="sections to run (all)")
    parser.add_argument("--peer", type=Path, metavar="FILE", help="Python interpreter with vLLM, to alternate with")
    parser.add_argument("--peer-driver", type=Path, metavar="FILE", help="script that drives the peer's scheduler")
    repeats = "fresh processes per section, reported as median (1)"
    parser.add_argument("--repeats", type=int, metavar="N", default=1, help=repeats)
    steady = "use the short path of steady decode (on)"
    parser.add_argument("--steady", action=argparse.BooleanOptionalAction, default=True, help=steady)
    _add_json(parser)


def sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="model whose tokenizer section masks uses (the demo's)")
    parser.add_argument("--sections", metavar="A,B", help="sections to run: worker, masks, fall, repeating (all)")
    parser.add_argument("--rows", type=int, metavar="N", default=256, help="rows of section worker's batch (256)")
    vocab = "vocabulary size of section worker's logits (32768)"
    parser.add_argument("--vocab-size", type=int, metavar="N", default=32768, help=vocab)
    repeats = "steps per figure of section worker, reported as median (20)"
    parser.add_argument("--repeats", type=int, metavar="N", default=20, help=repeats)
    shape = "model shape with random weights for section repeating, besides the demo model; repeatable"
    parser.add_argument("--shape", action="append", metavar="NAME", default=[], help=shape)
    parser.add_argument("--method", choices=("ngram", "suffix"), default="ngram", help="draft proposer (ngram)")
    output_len = "output tokens per request of section repeating (512)"
    parser.add_argument("--output-len", type=int, metavar="N", default=512, help=output_len)
    rounds = "timed requests of section repeating, reported as median (5)"
    parser.add_argument("--rounds", type=int, metavar="N", default=5, help=rounds)
    _add_json(parser)


def kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to measure (auto)")
    parser.add_argument("--sections", metavar="A,B", help="sections to run (all of the device)")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and less time per shape")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, to check that everything runs")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start no measurement after this time")
    _add_json(parser)
