"""Damaged images, sent to helper processes with a processor of transformers, and URLs that lead inside.

    python -P tests/nightly/acceptance/fuzz_images.py --seconds 3600 --seed 1

Every file is read or refused with one line, whole images are read as before, nothing takes longer than the limits, and
no file is left. The last line is JSON; exit status 1 means that something else happened.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from itertools import chain, takewhile
from pathlib import Path

sys.path.extend(map(str, (Path(__file__).resolve().parents[2] / "support").iterdir()))

from image_attacks import attack_with_files, attack_with_urls
from image_files import bombs, mutations, not_images, whole_files
from image_hosts import hostile_urls, world
from processor_families import qwen

from quire.frontend.images.image_helper import MAX_BYTES, WALL_SECONDS
from quire.frontend.images.options import ImageOptions
from quire.frontend.images.reader import ImageReader
from quire.frontend.images.store import ItemStore


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, metavar="N", help="number of damaged files (10000)")
    parser.add_argument("--seconds", type=float, default=3600.0, metavar="SECONDS", help="longest duration (3600)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (0)")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        model, items = Path(place) / "model", Path(place) / "items"
        items.mkdir()
        processor, _, row_token = qwen()
        processor.save_pretrained(model)
        store = ItemStore(2**28, items)
        token_id = processor.tokenizer.convert_tokens_to_ids(row_token)
        reader = ImageReader(str(model), token_id, ImageOptions(image_processes=1), store)
        known = (*whole_files().values(), *bombs().values(), *not_images().values())
        sent = chain(known, mutations(args.count - len(known), args.seed))
        files = attack_with_files(reader, takewhile(lambda _: time.monotonic() < began + args.seconds, sent))
        reader.close()
        store.close()
        left = len(list(items.iterdir()))
    with world() as server:
        urls = attack_with_urls(server, hostile_urls())
    slowest, peak = files.pop("slowest_ms") / 1000, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    for name, found in (("files", files), ("URLs", urls)):
        print(f"{found.total()} {name}")
        for reason, number in found.most_common():
            print(f"  {number:6} {reason}")
    is_bounded = slowest < WALL_SECONDS and peak < MAX_BYTES + 2**30
    figures = {"files": files.total(), "read": files["read"], "urls": urls.total(), "left": left}
    sizes = {"slowest_s": slowest, "helper_peak_mb": peak >> 20, "own_peak_mb": _own_peak() >> 20}
    print(json.dumps({**figures, **sizes, "seconds": round(time.monotonic() - began, 1)}))
    return 0 if is_bounded and not left else 1


def _own_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
