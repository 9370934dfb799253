"""LoRARequest: the adapter of a call of the offline API, with vLLM's fields."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.frontend.adapters.names import name_problem
from quire.frontend.adapters.reader import AdapterReader
from quire.protocol.errors import InvalidRequest, printable
from quire.protocol.model.adapter_config import AdapterError
from quire.protocol.request.sampling_params import check_int
from quire.protocol.wire.adapter_messages import AdapterRef


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter to answer with.

    Attributes:
        lora_name: its name in errors and statistics.
        lora_int_id: from 1, as vLLM requires. It has no effect: the content identifies an adapter.
        lora_path: its folder.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path

    def __post_init__(self) -> None:
        """Raise InvalidRequest for a name that an adapter cannot have, an id below 1, or a path of another type."""
        name: object = self.lora_name
        if not isinstance(name, str):
            raise InvalidRequest(f"lora_name must be a string (got {printable(name)})", "lora_name")
        if problem := name_problem(name):
            raise InvalidRequest(problem, "lora_name")
        check_int("lora_int_id", self.lora_int_id, 1, 2**63 - 1)
        if not isinstance(self.lora_path, str | Path) or not str(self.lora_path):
            text = f"lora_path must be the path of a folder (got {printable(self.lora_path)})"
            raise InvalidRequest(text, "lora_path")


def adapters_for(
    given: LoRARequest | Sequence[LoRARequest | None] | None, num_prompts: int, reader: AdapterReader | None
) -> list[AdapterRef | None]:
    """Return the adapter of each prompt. A folder is read once, and again when one of its files has changed.

    Args:
        given: one for all prompts, or one per prompt; None: no adapter.
        reader: None if the engine has no adapters.

    Raises:
        InvalidRequest: the engine has no adapters, the numbers differ, or a value has another type.
        AdapterError: an adapter cannot be used, with its folder and the reason.
    """
    each = list(given) if isinstance(given, Sequence) else [given] * num_prompts
    for request in each:
        if request is not None and not isinstance(request, LoRARequest):
            text = f"lora_request must be a LoRARequest, None, or a list of these (got {printable(request)})"
            raise InvalidRequest(text, "lora_request")
    if len(each) != num_prompts:
        raise InvalidRequest(f"{len(each)} lora_requests for {num_prompts} prompts", "lora_request")
    found = {request: _reference(request, reader) for request in set(each) if request is not None}
    return [None if request is None else found[request] for request in each]


def _reference(request: LoRARequest, reader: AdapterReader | None) -> AdapterRef:
    if reader is None:
        raise InvalidRequest("lora_request needs LLM(..., enable_lora=True)", "lora_request")
    folder = Path(request.lora_path).expanduser().absolute()
    try:
        read = reader.read(folder)
    except FileNotFoundError:
        raise AdapterError(f"{folder} is not a folder") from None
    return AdapterRef(request.lora_name, read.digest, read.path)
