"""A peer of ``quire bench engine``: run as a script, by the peer's own interpreter.

    python peer_driver.py write CONFIG.json FOLDER SEED      # a random-weights checkpoint, bfloat16, by transformers
    python peer_driver.py serve FOLDER transformers-static|transformers-continuous|vllm DTYPE THREADS

``serve`` says one JSON line when it is ready, and then answers each line ``{"prompts": [[id, ...]], "output_len": n}``
on its input with one line. It imports nothing of ours, so that the peer needs no more than its own packages.
"""

import importlib
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    command, *rest = sys.argv[1:]
    # The library prints to stdout now and then: keep that for ourselves, and let it have stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if command == "write":
        write_checkpoint(Path(rest[0]), Path(rest[1]), int(rest[2]))
        return
    folder, mode, dtype, threads = rest
    serve(folder, mode, dtype, int(threads), answers)


def write_checkpoint(config_path: Path, folder: Path, seed: int) -> None:
    torch, transformers = _libraries()
    fields = json.loads(config_path.read_text(encoding="utf-8"))
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def serve(folder: str, mode: str, dtype: str, threads: int, answers: Any) -> None:
    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        started = time.perf_counter()
        kind, _, mode = mode.partition("-")
        dtype = fastest_dtype(importlib.import_module("torch"), threads) if dtype == "auto" else dtype
        # Not an import: this folder is not on the path, and must not be, for it holds no package of the peer's.
        peer = runpy.run_path(str(Path(__file__).with_name(f"peer_{kind}.py")))["Peer"](folder, mode, dtype, threads)
        answer(ready_s=time.perf_counter() - started, dtype=peer.dtype, version=peer.version)
        for line in sys.stdin:
            order = json.loads(line)
            begun = time.perf_counter()
            outputs = peer.generate(order["prompts"], order["output_len"])
            seconds = time.perf_counter() - begun
            if [len(ids) for ids in outputs] != [order["output_len"]] * len(order["prompts"]):
                raise RuntimeError("answers of a wrong length")
            answer(seconds=seconds, tokens=sum(map(len, outputs)))
    except Exception as error:  # whatever the library raises is the peer's result
        answer(error=f"{type(error).__name__}: {error}")


def _libraries() -> tuple[Any, Any]:
    """torch and transformers, imported only now: in our own environment this file is read, but not run."""
    return importlib.import_module("torch"), importlib.import_module("transformers")


def fastest_dtype(torch: Any, threads: int) -> str:
    """bfloat16 where the CPU multiplies it natively, else float32."""
    torch.set_num_threads(threads)
    times = {}
    for name in ("float32", "bfloat16"):
        dtype = getattr(torch, name)
        x, w = torch.randn(32, 1024).to(dtype), torch.randn(2048, 1024).to(dtype)
        torch.nn.functional.linear(x, w)
        begun = time.perf_counter()
        for _ in range(10):
            torch.nn.functional.linear(x, w)
        times[name] = time.perf_counter() - begun
    return min(times, key=times.__getitem__)


if __name__ == "__main__":
    main()
