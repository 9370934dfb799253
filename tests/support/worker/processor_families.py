"""Small processors of transformers with tokenizers and chat templates, as their classes make them without torchvision.

Each function returns the processor, its chat template and the token whose positions take rows.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWEN = TURNS + (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}" + ASK
)
SMOL = (
    "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}{% if m.content[0]['type'] == 'image' %}:{% else %}: "
    "{% endif %}{% for c in m.content %}{% if c['type'] == 'text' %}{{ c['text'] }}{% elif c['type'] == 'image' %}"
    "{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.role.upper() + ': ' }}{% endif %}"
    "{% for c in m.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
PIXTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% else %}[IMG]{% endif %}{% endfor %}"
    "{% endif %}[/INST]{% else %}{{ m.content if m.content is string else m.content[0].text }}</s>{% endif %}"
    "{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{% if m.content is string %}"
    "{{ m.content | trim }}{% else %}{% for c in m.content %}{% if c['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif c['type'] == 'text' %}{{ c['text'] | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
)


def fast_tokenizer(special: list[str], **more: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["what is shown in this picture, and in that one?"] * 4,
        trainers.BpeTrainer(
            vocab_size=340, special_tokens=["<s>", "</s>", *special], initial_alphabet=alphabet, show_progress=False
        ),
    )
    if more.pop("adds_bos", False):
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", **more)


def qwen() -> tuple[Any, str, str]:
    from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    special = "<|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
    tokenizer = fast_tokenizer(special.split())
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 16)
    return without_video(Qwen2_5_VLProcessor, images, tokenizer), QWEN, "<|image_pad|>"


def without_video(kind: type[Any], images: Any, tokenizer: Any) -> Any:
    """Make a processor whose videos would need torchvision."""

    class Made(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> None:
            pass

        def save_pretrained(self, folder: Path) -> None:
            self.tokenizer.save_pretrained(folder)
            self.image_processor.save_pretrained(folder)
            settings = json.loads((folder / "preprocessor_config.json").read_text())
            settings |= {"processor_class": kind.__name__}
            (folder / "preprocessor_config.json").write_text(json.dumps(settings))

    Made.__name__ = kind.__name__
    return Made(images, tokenizer, None)


def smol() -> tuple[Any, str, str]:
    from transformers.models.idefics3 import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    rows = [f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)]
    names = "<image> <fake_token_around_image> <end_of_utterance> <|im_start|> <global-img>"
    tokenizer = fast_tokenizer([*names.split(), *rows])
    images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return Idefics3Processor(images, tokenizer, image_seq_len=4), SMOL, "<image>"


def llava() -> tuple[Any, str, str]:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava import LlavaProcessor

    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    tokenizer = fast_tokenizer(["<image>"], adds_bos=True)
    made = LlavaProcessor(images, tokenizer, patch_size=14, vision_feature_select_strategy="default")
    made.num_additional_image_tokens = 1
    return made, LLAVA, "<image>"


def pixtral() -> tuple[Any, str, str]:
    from transformers.models.pixtral import image_processing_pil_pixtral

    # Otherwise it demands torchvision, of which it uses nothing.
    with_torchvision = "transformers.models.pixtral.image_processing_pixtral"
    sys.modules.setdefault(with_torchvision, image_processing_pil_pixtral)
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    tokenizer = fast_tokenizer(["[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    images = image_processing_pil_pixtral.PixtralImageProcessorPil(
        size={"longest_edge": 64}, patch_size={"height": 16, "width": 16}
    )
    return PixtralProcessor(images, tokenizer, patch_size=16), PIXTRAL, "[IMG]"


def gemma() -> tuple[Any, str, str]:
    from transformers.models.gemma3 import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = "<start_of_turn> <end_of_turn> <start_of_image> <end_of_image> <image_soft_token>"
    special = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = fast_tokenizer(names.split(), extra_special_tokens=special)
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    return Gemma3Processor(images, tokenizer, image_seq_length=5), GEMMA, "<image_soft_token>"


FAMILIES: list[Callable[[], tuple[Any, str, str]]] = [qwen, smol, llava, pixtral, gemma]
