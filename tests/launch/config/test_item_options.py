"""The settings of images and given embeddings, and the kinds of items that requests may then have."""

from typing import Any

import msgspec
import pytest
from configs import MODEL

from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.options import parse_options
from quire.protocol.config import EngineConfig, RankPlace
from quire.protocol.errors import ConfigError
from quire.protocol.model.vision_config import VisionConfig

IMAGES = msgspec.structs.replace(MODEL, vision=VisionConfig("TinyVision", 9))


def config_of(*, images: bool, **options: Any) -> EngineConfig:
    return make_engine_config(parse_options(options, "LLM"), IMAGES if images else MODEL)


@pytest.mark.parametrize(
    ("images", "options", "tokens", "kinds"),
    [
        (False, {}, 0, ()),
        (False, {"encoder_cache_tokens": 0}, 0, ()),
        (False, {"enable_prompt_embeds": True}, 16384, ("rows",)),
        (True, {}, 16384, ("image",)),
        (True, {"encoder_cache_tokens": "2k", "enable_prompt_embeds": True}, 2000, ("image", "rows")),
        (True, {"encoder_cache_tokens": 0, "enable_chunked_prefill": False}, 0, ()),
    ],
)
def test_kinds_of_items(images: bool, options: dict[str, Any], tokens: int, kinds: tuple[str, ...]) -> None:
    config = config_of(images=images, **options)
    assert (config.encoder_cache_tokens, config.item_kinds) == (tokens, kinds)
    assert msgspec.structs.replace(config, ranks=[RankPlace("tcp://10.0.0.2:5")]).item_kinds == ()


@pytest.mark.parametrize("missing", [["transformers", "PIL"], ["PIL"]])
def test_models_with_images_name_missing_packages_and_both_ways_out(
    missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else name)
    ways = r"pip install 'quire-serve\[vision\]', or --encoder-cache-tokens 0 to serve text only$"
    with pytest.raises(ConfigError, match=f"^images need {' and '.join(missing)}: {ways}"):
        config_of(images=True)
    assert config_of(images=True, encoder_cache_tokens=0).item_kinds == config_of(images=False).item_kinds == ()


@pytest.mark.parametrize(
    ("images", "options", "text"),
    [
        (False, {"encoder_cache_tokens": 64}, "--encoder-cache-tokens 64 needs a model that reads images"),
        (True, {"encoder_cache_tokens": -1}, "--encoder-cache-tokens must be from 0 to"),
        (True, {"enable_chunked_prefill": False}, "images need --enable-chunked-prefill: for text only, set"),
        (
            False,
            {"enable_prompt_embeds": True, "enable_chunked_prefill": False},
            "--enable-prompt-embeds needs --enable-chunked-prefill",
        ),
        (False, {"enable_prompt_embeds": True, "encoder_cache_tokens": 0}, "of at least 1 .got 0.: omit that flag"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(images: bool, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_of(images=images, **options)
