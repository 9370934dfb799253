"""Tiny random checkpoints that make vectors and scores, saved by sentence-transformers and transformers.

The import of sentence-transformers takes ten seconds: only functions for tests of the tier ``full`` need it.
"""

import json
from pathlib import Path
from typing import Any

from checkpoints import TINY

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "no", "yes"]
LONGEST = 2304
"""Positions of these models."""


def save_tokenizer(folder: Path, *, vocab_size: int = TINY["vocab_size"]) -> None:
    """Save a tokenizer whose token ``i`` is the word ``w{i}``, after the special ones."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"w{index}" for index in range(len(SPECIAL), vocab_size))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    wrapped.save_pretrained(folder)


def text_of(tokens: list[int]) -> str:
    """Return the text that the tokenizer maps to these tokens."""
    return " ".join(SPECIAL[token] if token < len(SPECIAL) else f"w{token}" for token in tokens)


def save_model(folder: Path, name: str, *, seed: int = 0, **settings: Any) -> Any:
    """Save a random model of a transformers class such as ``Qwen3Model``, with the tokenizer, and return it."""
    import torch
    import transformers

    family = name.removesuffix("Model").removesuffix("ForCausalLM").removesuffix("ForSequenceClassification")
    own: dict[str, Any] = {"head_dim": 8} if family in ("Qwen3", "Mistral", "Gemma") else {}
    shape = TINY | {"max_position_embeddings": LONGEST} | own | settings
    config = getattr(transformers, f"{family}Config")(**shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, name)(config).eval()
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if key.endswith(("bias", "norm.weight")):
                    weight.add_(torch.randn(weight.shape) * 0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder, vocab_size=shape["vocab_size"])
    return model


def save_embedding(folder: Path, name: str, mode: str, *, normalize: bool = True, **settings: Any) -> Any:
    """Save a random model of transformers with the files of a bi-encoder, and return it."""
    model = save_model(folder, name, **settings)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{at}_{kind}"} for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps([modules[0] | {"path": ""}, *modules[1:]]))
    (folder / "1_Pooling").mkdir()
    sizes = {"word_embedding_dimension": model.config.hidden_size, f"pooling_mode_{mode}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(sizes))
    return model


def save_bi_encoder(folder: Path, name: str, mode: str, *, normalize: bool = True, **settings: Any) -> Any:
    """Save a random bi-encoder with the pooling mode of sentence-transformers, and return it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    save_model(folder / "plain", name, **settings)
    transformer = Transformer(str(folder / "plain"))
    modules: list[Any] = [transformer, Pooling(transformer.get_embedding_dimension(), mode)]
    if normalize:
        modules.append(Normalize())
    made = SentenceTransformer(modules=modules, device="cpu", prompts={"query": "w6 w7 "})
    made.save_pretrained(str(folder / "saved"), create_model_card=False)
    return made


def save_cross_encoder(folder: Path, name: str, **settings: Any) -> Any:
    """Save a random cross-encoder: a classification, or a causal language model with the scores of yes and no."""
    from sentence_transformers import CrossEncoder

    save_model(folder / "plain", name, **settings)
    made = CrossEncoder(str(folder / "plain"), device="cpu")
    made.save_pretrained(str(folder / "saved"), create_model_card=False)
    return made


CHAT_VOCABULARY = 300
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TYPED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}<|im_end|>"
)
JUDGE = (
    "<|im_start|>system\nAnswer yes or no.<|im_end|>\n<|im_start|>user\n"
    "Judge: {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default('find') }}\n"
    "Query: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "Document: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
USERS_ONLY = "{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}"


def save_chat_tokenizer(folder: Path, template: str = "") -> None:
    """Save a byte-level tokenizer with a chat template ("": without one), in place of the one in the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(
        ["yes yes no no", "the user and the system", "Query: the Document: the end"] * 3,
        trainers.BpeTrainer(
            vocab_size=CHAT_VOCABULARY,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    made.post_processor = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[(special[0], 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, pad_token=special[0], eos_token=special[2])
    if template:
        wrapped.chat_template = template
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    wrapped.save_pretrained(folder)
