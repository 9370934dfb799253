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
