"""``run.py images``: text streams beside images in work, on a random LLaVA or a simulated device."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from own_server import serving

from quire.launch import cli

SIDE = 168
"""Pixels: 144 patches, which are as many positions."""
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
LOAD = "--images 100 --concurrency 4 --input-len 64 --max-tokens 384 --ignore-eos"


def run(args: argparse.Namespace) -> None:
    """Run the harness. Exit status 1 if a request failed, or no image was answered."""
    if AUTOGROUP.exists() and AUTOGROUP.read_text().strip() != "0":
        print("The kernel shares the cores between sessions, not by priority: see images in tests/nightly/README.md")
    with tempfile.TemporaryDirectory() as folder:
        _write_checkpoint(Path(folder))
        device = ["--simulate", args.simulate] if args.simulate else ["--dtype", "float32"]
        flags = [folder, "--served-model-name", "llava", "--max-model-len", "1024", "--no-standby-workers", *device]
        with serving(None, None, flags, args.serve_args) as target:
            more = ["--json", str(args.json)] if args.json else []
            # A phase takes about 8 s: a step of the simulated device takes longer than one of this model.
            number = ["--num-prompts", "8" if args.simulate else "24", "--rounds", str(args.rounds)]
            cli.main(["bench", "serve", "--url", target.url, *LOAD.split(), *number, *more])


def _write_checkpoint(folder: Path) -> None:
    import transformers
    from processor_families import llava

    processor, template, token = llava()
    eyes = SIZES | {"num_attention_heads": 4, "image_size": SIDE, "patch_size": 14, "model_type": "clip_vision_model"}
    text = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(processor.tokenizer)}
    config = transformers.LlavaConfig(
        text_config=text | {"model_type": "llama", "max_position_embeddings": 2048},
        vision_config=eyes,
        image_token_id=processor.tokenizer.convert_tokens_to_ids(token),
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    images = processor.image_processor
    images.size, images.crop_size = {"shortest_edge": SIDE}, {"height": SIDE, "width": SIDE}
    processor.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
