"""The peer of ``quire bench embed``, sentence-transformers: a script that the peer's own interpreter runs.

    python embed.py write CONFIG.json FOLDER                          # random weights; needs transformers
    python embed.py serve FOLDER sentence-transformers DTYPE THREADS TEXTS 0

``write`` adds a tokenizer with the words w0, w1 and so on as tokens, and prints ``{}``. ``serve`` prints one JSON line
when it is ready, and then answers each input line ``{"prompts": [text, ...], "output_len": n}`` with one line: it
embeds n texts in each call. It imports nothing of Quire.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    command, *rest = sys.argv[1:]
    # The library may print to stdout: reserve stdout for answers and redirect the library's prints to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    if command == "write":
        write(Path(rest[0]), Path(rest[1]))
        answer()
        return
    try:
        began = time.perf_counter()
        model, facts = load(rest[0], rest[2], int(rest[3]))
        answer(ready_s=time.perf_counter() - began, **facts)
        for line in sys.stdin:
            order = json.loads(line)
            texts, size = order["prompts"], order["output_len"]
            began = time.perf_counter()
            for start in range(0, len(texts), size):
                model.encode(texts[start : start + size], batch_size=size, show_progress_bar=False)
            answer(seconds=time.perf_counter() - began)
    except Exception as error:  # any error of the library is the peer's result
        answer(error=f"{type(error).__name__}: {error}")


def load(folder: str, dtype: str, threads: int) -> tuple[Any, dict[str, Any]]:
    import sentence_transformers
    import torch

    torch.set_num_threads(threads)
    settings = {"dtype": getattr(torch, dtype)}
    model = sentence_transformers.SentenceTransformer(folder, device="cpu", model_kwargs=settings)
    return model, {"dtype": dtype, "version": sentence_transformers.__version__}


def write(config_path: Path, folder: Path) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**json.loads(config_path.read_text(encoding="utf-8")))
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    words = {f"w{index}": index for index in range(config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", unk_token="w0")
    wrapped.save_pretrained(folder)
    parts = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": config.hidden_size, "pooling_mode_cls_token": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")


if __name__ == "__main__":
    main()
