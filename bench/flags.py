"""Flags of ``quire bench``, one function per benchmark."""

import argparse
from pathlib import Path

from quire.bench.peers import PEERS
from quire.launch.config.command_line import add_engine_options


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON line to FILE; -: print it alone")


def _add_number(parser: argparse.ArgumentParser, flag: str, default: int, text: str) -> None:
    parser.add_argument(flag, type=int, metavar="N", default=default, help=f"{text} ({default})")


def engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", metavar="NAME", help="model shape with random weights, such as smollm2-135m")
    _add_number(parser, "--num-requests", 32, "concurrent requests")
    _add_number(parser, "--input-len", 128, "tokens per prompt")
    _add_number(parser, "--output-len", 128, "output tokens per request")
    _add_number(parser, "--rounds", 3, "timed rounds, reported as median")
    _add_number(parser, "--prompt-seed", 0, "random seed for the prompts")
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
    _add_number(
        parser, "--adapters", 0, "repeat each round with N random LoRA adapters, of which each request has one in turn"
    )
    parser.add_argument("--adapter-rank", type=int, metavar="R", default=16, help="rank of these adapters (16)")
    _add_number(parser, "--busy", 0, "after each timed round, repeat it with N busy processes beside it")
    parser.add_argument("--peer-driver", type=Path, metavar="FILE", help="driver of the peers (tools/peers/engine.py)")
    dtypes = ("auto", "bfloat16", "float32")
    dtype = "dtype of the peers; auto: the faster one on this CPU (auto)"
    parser.add_argument("--peer-dtype", choices=dtypes, default="auto", help=dtype)
    _add_json(parser)
    add_engine_options(parser)


def embed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", metavar="NAME", help="encoder shape with random weights: bge-base or bge-small")
    _add_number(parser, "--num-texts", 64, "texts in a round")
    _add_number(parser, "--input-len", 128, "tokens per text")
    _add_number(parser, "--rounds", 3, "timed rounds")
    _add_number(parser, "--prompt-seed", 0, "random seed for the texts")
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
    _add_number(parser, "--concurrency", 8, "closed loop: number of clients with one request each")
    rate = "open loop instead of --concurrency: requests per second, Poisson arrivals"
    parser.add_argument("--rate", type=float, metavar="RATE", help=rate)
    _add_number(parser, "--max-tokens", 64, "most output tokens per request")
    parser.add_argument("--temperature", type=float, metavar="T", default=0.0, help="sampling temperature (0)")
    _add_number(parser, "--seed", 0, "random seed for arrivals and sampling")
    parser.add_argument("--chat", action="store_true", help="send chat messages instead of raw completions")
    parser.add_argument("--ignore-eos", action="store_true", help="generate exactly --max-tokens per request")
    images = "measure inter-token latency alone and beside N images in work, by turns"
    parser.add_argument("--images", type=int, metavar="N", help=images)
    _add_number(parser, "--rounds", 5, "rounds of --images, after one to warm up")
    parser.add_argument("--model", metavar="MODEL", help="served model name to request (first one listed)")
    parser.add_argument("--api-key", metavar="KEY", help="API key for the server (environment QUIRE_API_KEY)")
    _add_json(parser)


def beams(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", metavar="NAME", help="model shape with random weights, such as smollm2-135m")
    _add_number(parser, "--beam-width", 8, "beams of each search")
    _add_number(parser, "--num-prompts", 1, "searches at once")
    _add_number(parser, "--input-len", 128, "tokens per prompt")
    _add_number(parser, "--output-len", 64, "tokens per output")
    _add_number(parser, "--rounds", 5, "timed rounds, reported as median")
    _add_json(parser)
    add_engine_options(parser)


def pins(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="trace with conversations and their pauses, as of quire replay")
    cost = "roofline:llama-3.1-8b,h200"
    parser.add_argument("--cost", metavar="SPEC", default=cost, help=f"seconds of prefill, as of quire replay ({cost})")
    _add_number(parser, "--num-usable-blocks", 15_000, "blocks of the pool")
    _add_number(parser, "--block-size", 64, "tokens of a block")
    stagger = "seconds between the starts of conversations that have no common clock (60)"
    parser.add_argument("--stagger", type=float, metavar="S", default=60.0, help=stagger)
    _add_json(parser)


def wire(parser: argparse.ArgumentParser) -> None:
    _add_number(parser, "--num-requests", 256, "decoding requests")
    _add_number(parser, "--steps", 1024, "steps to record")
    _add_json(parser)


def router(parser: argparse.ArgumentParser) -> None:
    _add_number(parser, "--engines", 4, "engines")
    _add_number(parser, "--blocks", 100_000, "cached blocks of each engine")
    _add_number(parser, "--requests", 1000, "requests of each length")
    _add_number(parser, "--events", 200_000, "events to follow")
    _add_json(parser)


def scheduler(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sections", metavar="A,B", help="sections to run (all)")
    parser.add_argument("--peer", type=Path, metavar="FILE", help="Python interpreter with vLLM, to alternate with")
    parser.add_argument("--peer-driver", type=Path, metavar="FILE", help="script that drives the peer's scheduler")
    _add_number(parser, "--repeats", 1, "fresh processes per section, reported as median")
    steady = "use the short path of steady decode (on)"
    parser.add_argument("--steady", action=argparse.BooleanOptionalAction, default=True, help=steady)
    _add_json(parser)


def sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="model whose tokenizer section masks uses (the demo's)")
    parser.add_argument("--sections", metavar="A,B", help="sections to run: worker, masks, fall, repeating (all)")
    _add_number(parser, "--rows", 256, "rows of section worker's batch")
    _add_number(parser, "--vocab-size", 32768, "vocabulary size of section worker's logits")
    _add_number(parser, "--repeats", 20, "steps per figure of section worker, reported as median")
    shape = "model shape with random weights for section repeating, besides the demo model; repeatable"
    parser.add_argument("--shape", action="append", metavar="NAME", default=[], help=shape)
    parser.add_argument("--method", choices=("ngram", "suffix"), default="ngram", help="draft proposer (ngram)")
    _add_number(parser, "--output-len", 512, "output tokens per request of section repeating")
    _add_number(parser, "--rounds", 5, "timed requests of section repeating, reported as median")
    _add_json(parser)


def kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to measure (auto)")
    parser.add_argument("--sections", metavar="A,B", help="sections to run (all of the device)")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and less time per shape")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, to check that everything runs")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start no measurement after this time")
    _add_json(parser)
