"""The built-in demo model: its packaged folder, and the code that builds it.

The model lets a fresh installation answer something without a download.  Nothing here imports torch unless the model
is being built.
"""

from __future__ import annotations

from pathlib import Path


def demo_model_path() -> Path:
    """The packaged Hugging Face folder of the demo model."""
    return Path(__file__).resolve().parent / "model"
