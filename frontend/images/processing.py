"""The checkpoint's processor of transformers, for one image. Runs in helper processes only.

The processor has one generic form: an image processor makes tensors, and each placeholder in the text becomes the text
whose image tokens take the rows of the image. So no family has code here.
"""

import hashlib
import importlib
import json
import re
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from safetensors.numpy import save
from transformers.models.auto import processing_auto

from quire.frontend.images.decode import decode
from quire.frontend.images.refused import Refused
from quire.frontend.images.source import StoredItem
from quire.protocol.errors import ConfigError
from quire.protocol.model.config_fields import read_json

TRIAL_SIZE = (224, 224)
_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}


class Processor:
    def __init__(self, folder: Path, token_id: int) -> None:
        """Load the processor of a checkpoint. ``token_id``: token whose positions take rows.

        Raises:
            Refused: there is none, or it does not have the generic form.
        """
        self._token_id = token_id
        try:
            self._processor = _load(folder)
            self._placeholder = str(self._processor.image_token)
            settings = json.dumps(self._processor.to_dict(), sort_keys=True, default=str)
            self._settings = hashlib.sha256(f"{transformers.__version__}\0{settings}".encode()).digest()
            # A trial: what the library imports at first use, each child of the helper would import again.
            self._process(Image.new("RGB", TRIAL_SIZE), "")
        except Refused:
            raise
        except ImportError as error:
            why = re.split(r"\n| \(/", str(error).strip())[0]  # without the path of a module
            raise Refused(f"cannot be read: the checkpoint's processor needs a package: {why}") from None
        except Exception as error:  # files of a checkpoint may make the library raise anything
            text = f"{type(error).__name__} in transformers {transformers.__version__}"
            raise Refused(f"cannot be read: the checkpoint's processor cannot be used ({text})") from None

    def prepare(self, data: bytes, max_pixels: int, path: str) -> StoredItem:
        """Decode and process the file of an image, and write its tensors to ``path``.

        Raises:
            Refused: it cannot be decoded, or the processor does not take an image of its size or shape.
            MemoryError: it needs more than this process may have.
            OSError: there is no room for the file.
        """
        image = decode(data, max_pixels)
        try:
            made, content = self._process(image, path)
        except MemoryError:
            raise
        except Exception:
            size = f"{image.width} x {image.height} pixels"
            raise Refused(f"must be an image that the model's processor takes (got {size})") from None
        Path(path).write_bytes(content)
        return made

    def _process(self, image: Image.Image, path: str) -> tuple[StoredItem, bytes]:
        """Return an image that will be stored at ``path``, and the content of its file."""
        options = {"return_tensors": "np", "return_text_replacement_offsets": True}
        made = self._processor(images=[image], text=[self._placeholder], **options)
        num_rows = int((np.asarray(made["input_ids"]) == self._token_id).sum())
        tensors = {name: np.asarray(value) for name, value in made.items() if name not in _OF_TEXT}
        if not num_rows or any(tensor.dtype.kind not in "fiub" for tensor in tensors.values()):
            raise ValueError("no rows, or no tensors")
        content = save(tensors)
        look = f"{image.width}x{image.height} {image.mode}\0".encode()
        stored = StoredItem(
            digest=hashlib.sha256(self._settings + look + image.tobytes()).digest(),
            path=path,
            placeholder=self._placeholder,
            expansion=made["text_replacement_offsets"][0][0]["replacement"],
            num_rows=num_rows,
            grid=tuple(tensors["image_grid_thw"][0].tolist()) if "image_grid_thw" in tensors else (),
            num_bytes=len(content),
        )
        return stored, content


def _load(folder: Path) -> Any:
    found = _class(folder)

    class Found(found):  # type: ignore[misc, valid-type]
        """Without what processes videos and sounds: of those the classes for videos need torchvision."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            pass

    Found.__name__ = found.__name__  # which its settings name
    automatic: Any = transformers
    loaders = {
        "tokenizer": automatic.AutoTokenizer.from_pretrained,
        "image_processor": partial(automatic.AutoImageProcessor.from_pretrained, backend="pil"),
    }
    names = Found.get_attributes()
    parts = [loaders[name](folder, local_files_only=True) if name in loaders else None for name in names]
    settings, _ = Found.get_processor_dict(folder, local_files_only=True)
    return Found.from_args_and_dict(parts, settings)


def _class(folder: Path) -> Any:
    """Return the processor's class in transformers.

    Not by AutoProcessor, nor by the package's own names: without torchvision those are stand-ins for some classes that
    need it for videos only.
    """
    named = next((name for file in _FILES if (name := _read(folder / file).get("processor_class"))), None)
    model_type = str(_read(folder / "config.json").get("model_type"))
    names: dict[str, str] = processing_auto.PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]  # not in its __all__
    named = named or names.get(model_type)
    kinds = [kind for kind, name in names.items() if name == named]
    for kind in sorted(kinds, key=lambda kind: kind != model_type):
        module = _module(kind)
        if hasattr(module, str(named)):
            return getattr(module, str(named))
    raise Refused("cannot be read: the checkpoint names no processor that this version of transformers has")


def _module(kind: str) -> Any:
    """Import the module of the processors of a kind of model, or return None."""
    kind = kind.replace("-", "_")
    name = f"transformers.models.{kind}"
    with suppress(ImportError):  # the class is in the module of another kind
        try:
            return importlib.import_module(f"{name}.processing_{kind}")
        except ImportError:
            # Some take a function from the image processor that needs torchvision; the one for Pillow has it, too.
            pillow = importlib.import_module(f"{name}.image_processing_pil_{kind}")
            sys.modules.setdefault(f"{name}.image_processing_{kind}", pillow)
            return importlib.import_module(f"{name}.processing_{kind}")
    return None


def _read(file: Path) -> dict[str, Any]:
    with suppress(ConfigError):
        return read_json(file)
    return {}
