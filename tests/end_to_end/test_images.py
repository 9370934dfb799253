"""Images through the whole engine: answers equal transformers', whichever way an image comes.

The checkpoints have random weights, a tokenizer of words, and the real processors.
"""

import base64
import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fault_server import Role
from served import Served
from tokenizers import Tokenizer, models, pre_tokenizers
from vision_checkpoints import CASES, IMAGE, make_checkpoint

from quire import LLM, SamplingParams
from quire.protocol.errors import InvalidRequest

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}w10 {% for c in m.content %}{% if c.type == 'image' %}w13 <image> w14 "
    "{% elif c.type == 'text' %}{{ c.text }} {% endif %}{% endfor %}w11 {% endfor %}"
    "{% if add_generation_prompt %}w12{% endif %}"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
FLAGS = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 60, "block_size": 8}


class Reference:
    """A checkpoint in ``folder``, and transformers' answers to its prompts."""

    def __init__(self, folder: Path, family: str) -> None:
        from transformers import PreTrainedTokenizerFast
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
        from transformers.models.llava.processing_llava import LlavaProcessor
        from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        class QwenProcessor(Qwen2_5_VLProcessor):
            def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
                """Accept None for what processes videos, which needs torchvision."""

        words = [f"w{i}" for i in range(128)]
        words[:3], words[IMAGE : IMAGE + 2] = ["<unk>", "<s>", "</s>"], ["<image>", "<video>"]
        made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        special = {"image_token": "<image>", "video_token": "<video>"}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=made, unk_token="<unk>", eos_token="</s>", extra_special_tokens=special
        )
        self.model = make_checkpoint(folder, family)
        settings = CASES[family].processor[1]
        if family == "llava":
            images = CLIPImageProcessorPil(**settings)
            self.processor = LlavaProcessor(
                images,
                tokenizer,
                patch_size=14,
                vision_feature_select_strategy="default",
                num_additional_image_tokens=1,
            )
            self.processor.save_pretrained(folder)
        else:
            images = Qwen2VLImageProcessorPil(**settings)
            self.processor = QwenProcessor(images, tokenizer)
            tokenizer.save_pretrained(folder)
            images.save_pretrained(folder)
        self.processor.chat_template = TEMPLATE
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        self.folder = folder

    def answer(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Return the ids of the prompt and of the answer."""
        inputs = self.processor.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        with torch.no_grad():
            ids = self.model.generate(
                **inputs, do_sample=False, max_new_tokens=6, min_new_tokens=6, eos_token_id=None, pad_token_id=0
            )[0].tolist()
        length = inputs["input_ids"].shape[1]
        return ids[:length], ids[length:]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("llava"), "llava")


@pytest.fixture
def llm(reference: Reference, lend: Callable[..., LLM]) -> LLM:
    return lend(reference.folder, enable_prompt_embeds=True, **FLAGS)


def picture(seed: int) -> Any:
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8))


def url(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def shown(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_answers_equal_transformers(
    family: str, reference: Reference, lend: Callable[..., LLM], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if family != "llava":
        reference = Reference(tmp_path_factory.mktemp(family), family)
    llm = lend(reference.folder, enable_prompt_embeds=True, **FLAGS)
    one, other = picture(1), picture(2)
    talk = [user(shown(one), text("w20 w21")), {"role": "assistant", "content": [text("w30")]}]
    conversations = [
        [user(text("w20"), shown(one), text("w21"))],
        [user(shown(one), shown(other), text("w22"))],
        [user(text("w20 w21"))],
        [*talk, user(shown(other), text("w23"))],
    ]
    for messages in conversations:
        (output,) = llm.chat(messages, GREEDY)
        assert (output.prompt_token_ids, output.outputs[0].token_ids) == reference.answer(messages)
    parts = [{"type": "image_url", "image_url": {"url": url(one)}}, text("w20 w21")]
    again = llm.chat([{"role": "user", "content": parts}, *talk[1:], user(shown(other), text("w24"))], GREEDY)[0]
    assert again.num_cached_tokens >= 8, "the same pixels under another name are found in the prefix cache"
    elsewhere = llm.chat([user(shown(picture(3)), text("w20 w21"))], GREEDY)[0]
    assert elsewhere.num_cached_tokens == 0, "another picture shares no block"


def test_sessions_and_forks_keep_their_images(llm: LLM, reference: Reference) -> None:
    one, other = picture(1), picture(2)
    with llm.session() as session:
        session.chat([user(shown(one), text("w20"))], GREEDY)
        second = session.chat([user(shown(other), text("w21"))], GREEDY)
    whole = llm.start({"prompt_token_ids": second.prompt_token_ids}, GREEDY)
    assert whole.read().token_ids != second.outputs[0].token_ids, "the images count"
    (several,) = llm.chat([user(shown(one), text("w20"))], SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=4))
    assert len(several.outputs) == 3


def test_embeddings_of_a_text_give_its_answer(llm: LLM, reference: Reference) -> None:
    ids = [10, 20, 21, 30, 31, 32, 11, 12]
    rows = reference.model.get_input_embeddings().weight[ids].detach()
    plain, given = llm.generate([{"prompt_token_ids": ids}, {"prompt_embeds": rows}], GREEDY)
    assert given.outputs[0].token_ids == plain.outputs[0].token_ids
    with pytest.raises(InvalidRequest, match="repetition_penalty cannot be combined with prompt_embeds"):
        llm.generate({"prompt_embeds": rows}, SamplingParams(repetition_penalty=2.0))
    with pytest.raises(InvalidRequest, match=r"prompt_embeds must have the shape \[n, 64\]"):
        llm.generate({"prompt_embeds": rows[:, :3]}, GREEDY)


@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_a_server_answers_all_apis_and_survives_deaths(reference: Reference, role: Role) -> None:
    image, words = url(picture(1)), "w20 w21"
    flags = ("--dtype", "float32", "--max-model-len", "128", "--block-size", "8", "--served-model-name", "tiny")
    with contextlib.closing(Served(str(reference.folder), *flags)) as server, httpx.Client(timeout=400) as http:
        chat = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}, text(words)]}
        body = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 90, "messages": [chat]}
        expected = http.post(f"{server.url}/v1/chat/completions", json=body).json()
        content = expected["choices"][0]["message"]["content"]
        assert expected["usage"]["prompt_tokens_details"]["image_tokens"] == 4

        source = {"type": "base64", "media_type": "image/png", "data": image.partition(",")[2]}
        blocks = [{"type": "image", "source": source}, text(words)]
        message = http.post(
            f"{server.url}/v1/messages", json={**body, "messages": [{"role": "user", "content": blocks}]}
        ).json()
        assert message["content"][0]["text"] == content
        assert message["usage"]["cache_read_input_tokens"], "the same picture in another API"

        streamed = ""
        with http.stream("POST", f"{server.url}/v1/chat/completions", json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    if not streamed:
                        server.victims(role)[0].kill()
                    streamed += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        assert streamed == content, "the picture is read again after a death"
        server.end()
