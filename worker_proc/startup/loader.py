"""Loads weights from a Hugging Face folder of safetensors files: memory-mapped, with every tensor accounted for.

Everything in the files' headers (names, shapes, dtypes, truncation) is checked before the first tensor is read, so that
a wrong checkpoint fails within a second. A rank reads only its own part of each tensor. Pickled weights (``.bin``,
``.pt``) are never opened.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from quire.kernels.common.mxfp4 import largest_scale
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint import EMBEDDING, HEAD, INDEX, StoredTensor, stored_tensors
from quire.protocol.model.checksums import verify_checksums
from quire.worker_proc.models.checkpoint_names import TensorSource, find_tensor_sources
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.weights import WeightSlot

DUMMY_SCALE = 120
"""2 ** -7: random codes, whose standard deviation is 2.9, become numbers with 0.023."""

_DESCRIPTIONS = ("config.json", "generation_config.json", INDEX)


def fill_model(model: Decoder, config: EngineConfig, dtype: torch.dtype, device: torch.device, progress: bool) -> None:
    """Load the weights that ``config`` names into ``model`` as ``dtype``; prepack them on a CPU.

    Raises:
        ConfigError: the checkpoint is invalid.
    """
    with torch.inference_mode():
        if config.load_format == "dummy":
            init_dummy_weights(model, config.seed)
        else:
            load_weights(model, Path(config.model_path), dtype, progress)
        if device.type == "cpu":
            model.prepack(deterministic=config.deterministic)


def load_weights(model: Decoder, folder: Path, dtype: torch.dtype, progress: bool) -> None:
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
    stored = stored_tensors(folder)
    slots = model.weight_slots()
    head = stored.pop(HEAD, None) if HEAD not in slots else None
    pieces = find_tensor_sources(folder, stored, slots, model.config)
    if model.build.parallel.rank == 0:
        verify_checksums(folder, [*(t.file for t in stored.values()), *(folder / name for name in _DESCRIPTIONS)])
    total = sum(_num_bytes(piece) for piece in pieces)
    sums: list[tuple[TensorSource, torch.Tensor]] = []
    bar = tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress)
    with bar, OpenFiles() as files:
        for piece in pieces:
            values = files.read(piece)
            _fill(piece.slot, values)
            if values.dtype is torch.uint8:
                _check_scales(piece, values, dtype)
            else:
                sums.append((piece, piece.slot.target.sum()))
            bar.update(_num_bytes(piece))
        _require_finite(sums)
        if head is not None:
            _check_tied(head, slots[EMBEDDING], files)


def init_dummy_weights(model: Decoder, seed: int) -> None:
    """Fill the model with dummy weights: norms are 1, all others normal with standard deviation 0.02.

    Weights in MXFP4 are uniform codes, with about that deviation. They depend only on the seed and the model's shape:
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
        if name.endswith("_scales"):
            slot.target.fill_(DUMMY_SCALE)
            continue
        pool = codes if slot.target.dtype is torch.uint8 else normal
        whole = slot.target
        if not whole.is_contiguous() or whole.shape != slot.shape:
            whole = torch.empty(slot.shape, dtype=slot.target.dtype)
        flat = whole.view(-1)
        done = 0
        while done < flat.numel():
            length = min(flat.numel() - done, pool.numel() - offset)
            flat[done : done + length] = pool[offset : offset + length]
            done += length
            offset = (offset + length) % pool.numel()
        if whole is not slot.target and slot.target.numel():
            slot.target.copy_(whole[slot.part])


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
        part = [slot.part[i] if i < len(slot.part) else slice(0, size) for i, size in enumerate(slot.shape)]
        last = piece.start + piece.step * (part[0].stop - 1)
        rows = slice(piece.start + piece.step * part[0].start, last + 1, piece.step)
        index = [rows, *part[1:]]
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


def _fill(slot: WeightSlot, values: torch.Tensor) -> None:
    if slot.offset:
        values = values.float() + slot.offset
    slot.target.copy_(values)


def _check_scales(piece: TensorSource, values: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ConfigError if ``values`` are scales of MXFP4 with which a number is NaN or infinite in ``dtype``."""
    limit = largest_scale(dtype)
    if piece.stored.name.endswith("_scales") and values.numel() and int(values.max()) > limit:
        raise ConfigError(
            f"{piece.stored.file}: tensor {piece.stored.name} has a scale of {int(values.max())}; numbers are finite "
            f"in {str(dtype).removeprefix('torch.')} up to {limit}"
        )


def _require_finite(sums: list[tuple[TensorSource, torch.Tensor]]) -> None:
    """Raise ConfigError if a tensor has NaN or infinite values, which would make every output invalid.

    A finite sum proves that all its values are finite, at the speed of memory. Sums are computed in the weights' dtype,
    because another one is 16 times as slow on a CPU; since such a sum may overflow although all values are finite, the
    tensors with non-finite sums are checked value by value.
    """
    if not sums:
        return
    suspects = torch.stack([total for _, total in sums]).isfinite().logical_not().nonzero().flatten().tolist()
    for index in suspects:
        piece, _ = sums[index]
        if not piece.slot.target.isfinite().all():
            as_dtype = str(piece.slot.target.dtype).removeprefix("torch.")
            raise ConfigError(f"{piece.stored.file}: tensor {piece.stored.name} has non-finite values in {as_dtype}")


def _num_bytes(piece: TensorSource) -> int:
    return piece.slot.target.numel() * piece.slot.target.element_size()


def _check_tied(head: StoredTensor, embedding: WeightSlot, files: OpenFiles) -> None:
    """Raise ConfigError if a stored output head differs from the embedding although they are tied."""
    same = head.shape == embedding.shape
    if same:
        stored = files.read(TensorSource(head, embedding))
        same = torch.equal(stored.to(embedding.target.dtype), embedding.target.cpu())
    if not same:
        raise ConfigError(
            f"{head.file}: tensor {head.name} differs from the embedding, but config.json sets tie_word_embeddings"
        )
