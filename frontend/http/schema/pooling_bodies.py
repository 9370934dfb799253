"""Fields of the bodies of requests for vectors and scores, with the names of OpenAI, Cohere, Jina and vLLM."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.frontend.http.schema.bodies import Effort
from quire.protocol.config import MAX_PRIORITY, MIN_PRIORITY
from quire.protocol.request.sampling_params import MAX_SALT_LENGTH

EncodingFormat = Annotated[Literal["float", "base64"], Meta(description="float or base64")]
Task = Annotated[
    Literal["embed", "token_embed", "classify"], Meta(description="one of embed, token_embed and classify")
]


class PoolingBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of all of them. ``use_activation``: None: true."""

    model: str | None = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    add_special_tokens: bool = True
    use_activation: bool | None = None
    priority: Annotated[int, Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_LENGTH)] = ""
    skip_reading_prefix_cache: bool = False
    # Ignored:
    user: str = ""


class ClassificationBody(PoolingBody, frozen=True, kw_only=True):
    """Either ``input`` or ``messages``, as in vLLM."""

    input: Any = None
    messages: Any = None
    prompt_name: str | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: Any = None
    reasoning_effort: Effort | None = None


class EmbeddingBody(ClassificationBody, frozen=True, kw_only=True):
    """``normalize``: another name of ``use_activation``."""

    dimensions: Any = None
    encoding_format: EncodingFormat = "float"
    normalize: bool | None = None
    task: Task | None = None
    """Of /pooling only."""


class ScoreBody(PoolingBody, frozen=True, kw_only=True):
    text_1: Any
    text_2: Any
    instruction: str = ""


class RerankBody(PoolingBody, frozen=True, kw_only=True):
    """``top_n``: 0: all. ``return_documents``: None: the route's default."""

    query: str
    documents: Any
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    return_documents: bool | None = None
    instruction: str = ""
