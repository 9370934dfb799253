"""Loads weights from a folder of safetensors files or a GGUF file: memory-mapped, with every tensor accounted for.

Everything in the files' headers (names, shapes, dtypes, truncation) is checked before the first tensor is read, so that
a wrong checkpoint fails within a second. A rank reads only its own part of each tensor. Pickled weights (``.bin``,
``.pt``) are never opened.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint import HEAD, INDEX, StoredTensor, stored_tensors
from quire.protocol.model.checksums import verify_checksums
from quire.protocol.model.gguf_file import is_gguf
from quire.worker_proc.models.checkpoint_names import TensorSource
from quire.worker_proc.models.formats.quantised import QuantisedLinear
from quire.worker_proc.models.latent_attention import LatentAttention
from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.model import Model
from quire.worker_proc.startup.gguf_tensors import read_gguf_tensor

_CODES = {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn}
_DESCRIPTIONS = ("config.json", "generation_config.json", INDEX)


def fill_model(model: Model, config: EngineConfig, dtype: torch.dtype, device: torch.device, progress: bool) -> None:
    """Load the weights that ``config`` names into ``model`` as ``dtype``; prepack them on a CPU.

    On a GPU quantised layers choose their product, and in deterministic mode all layers; it takes the loaded tensors.

    Raises:
        ConfigError: the checkpoint is invalid, or the loaded model cannot be served.
    """
    with torch.inference_mode():
        if device.type == "cpu":
            model.pack_as_read()
        if config.load_format == "dummy":
            init_dummy_weights(model, config.seed)
        else:
            load_weights(model, Path(config.model_path), dtype, progress)
        if device.type == "cpu":
            model.prepack(deterministic=config.deterministic)
        else:
            for layer in model.modules():
                if isinstance(layer, QuantisedLinear | LatentAttention) or (
                    config.deterministic and isinstance(layer, Linear)
                ):
                    layer.prepack(deterministic=config.deterministic)
        model.check_loaded()


def load_weights(model: Model, folder: Path, dtype: torch.dtype, progress: bool) -> None:
    """Fill the model from ``model.safetensors`` or the shards of ``model.safetensors.index.json``.

    Rank 0 compares the files with the folder's checksums, if there are any.

    Args:
        model: model with weights of ``dtype``; tensors stored in another floating dtype are converted.
        progress: show a progress bar on stderr.

    Raises:
        ConfigError: one line with file and tensor: a file is missing, truncated, corrupt or has an invalid header, or a
            tensor is missing, unexpected, duplicate, of the wrong shape, not of a floating dtype or not finite.
    """
    if model.dtype is not dtype:
        raise ValueError(f"the model's weights are {model.dtype}, expected {dtype}")
    stored = stored_tensors(folder, renamed=model.config.transformers is None)
    sources = model.tensor_sources(folder, stored)
    pieces = sources.pieces
    if model.build.parallel.rank == 0:
        beside = folder.parent if is_gguf(folder) else folder
        verify_checksums(beside, [*(t.file for t in stored.values()), *(folder / name for name in _DESCRIPTIONS)])
    total = sum(_num_bytes(piece) for piece in pieces)
    bar = tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress)
    with bar, OpenFiles() as files:
        fill_slots(pieces, files, bar.update)
        for tensor, like in sources.tied:
            _check_tied(tensor, like, model.dtype, files)


def fill_slots(
    pieces: Iterable[TensorSource], files: "OpenFiles", read: Callable[[int], object] = lambda num_bytes: None
) -> None:
    """Read tensors into their slots. ``read``: called with the bytes of each.

    Raises:
        ConfigError: a tensor cannot be read, or is not finite.
    """
    sums: list[tuple[TensorSource, torch.Tensor]] = []
    for piece in pieces:
        values, slot = files.read(piece), piece.slot
        problem = slot.check(values) if slot.check is not None and values.numel() else None
        if problem is None:
            problem = slot.fill(values)
        if problem is not None:
            raise ConfigError(f"{piece.stored.file}: tensor {piece.stored.name} {problem}")
        if slot.check is None and slot.put is None and slot.target.dtype.is_floating_point:
            sums.append((piece, piece.slot.target.sum()))
        read(_num_bytes(piece))
    _require_finite(sums)


def init_dummy_weights(model: Model, seed: int) -> None:
    """Fill the model with dummy weights: norms are 1, all others normal with standard deviation 0.02.

    Quantised weights are uniform codes, with about that deviation. They depend only on the seed and the model's shape:
    each rank takes its part of the weights that a single rank would have. One pool of random numbers is repeated
    through all tensors, because drawing billions of numbers would take minutes; its length is prime, so that rows
    differ.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = torch.empty(1_048_573).normal_(0.0, 0.02, generator=generator)
    codes = torch.randint(0, 256, normal.shape, dtype=torch.uint8, generator=generator)
    offset = 0
    for name, slot in model.weight_slots().items():
        if name.endswith("norm.weight"):
            slot.target.fill_(1.0)
            continue
        stored = _CODES.get(slot.dtypes[0], slot.target.dtype if slot.put is None else torch.float32)
        whole = slot.target
        filled = slot.put is not None or slot.order is not None
        if filled or not whole.is_contiguous() or whole.shape != slot.shape:
            whole = torch.empty(slot.shape, dtype=stored)
        if slot.dummy is not None:
            whole.copy_(torch.as_tensor(slot.dummy))
        elif slot.dtypes[0] in _CODES:
            # Without the highest bit of the exponent, no byte is NaN in fp8.
            pool = codes & 0xBF if stored is torch.float8_e4m3fn else codes
            offset = _repeat(pool, whole.view(-1).view(torch.uint8), offset)
        else:
            offset = _repeat(normal, whole.view(-1), offset)
        if whole is not slot.target and slot.target.numel():
            slot.fill(whole[slot.part])


def _repeat(pool: torch.Tensor, flat: torch.Tensor, offset: int) -> int:
    """Fill ``flat`` with the pool's numbers from ``offset`` on, repeated, and return the next offset."""
    done = 0
    while done < flat.numel():
        length = min(flat.numel() - done, pool.numel() - offset)
        flat[done : done + length] = pool[offset : offset + length]
        done += length
        offset = (offset + length) % pool.numel()
    return offset


class OpenFiles:
    """Memory maps of a checkpoint's files, each opened when its first tensor is read."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def read(self, piece: TensorSource) -> torch.Tensor:
        """Return the slot's part of the checkpoint, in the stored dtype."""
        slot = piece.slot
        if not slot.target.numel():
            return slot.target
        if piece.stored.gguf is not None:
            return read_gguf_tensor(piece.stored, slot)
        if not piece.stored.shape:
            return self.get(piece.stored)
        index = [slot.part[i] if i < len(slot.part) else slice(0, size) for i, size in enumerate(slot.shape)]
        if slot.rows_dim is not None:
            rows = index[slot.rows_dim]
            last = piece.start + piece.step * (rows.stop - 1)
            index[slot.rows_dim] = slice(piece.start + piece.step * rows.start, last + 1, piece.step)
        if piece.transposed:
            index.reverse()
        tensor = self.get(piece.stored, (*piece.lead, *index))
        return tensor.T if piece.transposed else tensor

    def get(self, stored: StoredTensor, index: tuple[int | slice, ...] = ()) -> torch.Tensor:
        """Return a part of a stored tensor; with no index, all of it."""
        try:
            if stored.file not in self._opened:
                self._opened[stored.file] = self._stack.enter_context(
                    safe_open(stored.file, framework="pt", device="cpu")
                )
            opened = self._opened[stored.file]
            whole = all(
                isinstance(i, slice) and (i.start, i.stop) == (0, size) and i.step in (None, 1)
                for i, size in zip(index, stored.shape, strict=False)
            )
            # A whole tensor is a view of the memory map; a part is a copy.
            tensor: torch.Tensor = opened.get_tensor(stored.name) if whole else opened.get_slice(stored.name)[index]
            return tensor
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{stored.file}: cannot be read: {' '.join(str(error).split())}") from None


def _require_finite(sums: list[tuple[TensorSource, torch.Tensor]]) -> None:
    """Raise ConfigError if a tensor has NaN or infinite values, which would make every output invalid.

    A finite sum proves that all its values are finite, at the speed of memory. Sums are computed in the weights' dtype,
    because another one is 16 times as slow on a CPU; since such a sum may overflow although all values are finite, the
    tensors with non-finite sums are checked value by value.
    """
    if not sums:
        return
    # One read of the device for all tensors, instead of one for each.
    suspects = torch.stack([total for _, total in sums]).isfinite().logical_not().nonzero().flatten().tolist()
    for index in suspects:
        piece, _ = sums[index]
        if not piece.slot.target.isfinite().all():
            as_dtype = str(piece.slot.target.dtype).removeprefix("torch.")
            raise ConfigError(f"{piece.stored.file}: tensor {piece.stored.name} has non-finite values in {as_dtype}")


def _num_bytes(piece: TensorSource) -> int:
    return piece.slot.target.numel() * piece.slot.target.element_size()


def _check_tied(tied: StoredTensor, to: TensorSource, dtype: torch.dtype, files: OpenFiles) -> None:
    """Raise ConfigError if a stored tensor, usually the output head, differs from the one that it is tied to."""
    same = tied.shape == to.stored.shape
    if same:
        sources = (to, replace(to, stored=tied))
        same = torch.equal(*(files.read(source).to(dtype) for source in sources))
    if not same:
        of = "the embedding" if tied.name == HEAD else to.stored.name
        raise ConfigError(
            f"{tied.file}: tensor {tied.name} differs from {of}, but config.json sets tie_word_embeddings"
        )
