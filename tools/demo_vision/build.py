"""Builds the demo model for images: a small SigLIP tower in front of the demo model, as a LLaVA checkpoint.

    python -P tools/demo_vision/build.py --out DIR [--start DIR] [--steps 2200] [--seed 0] [--threads 1]

Needs torch, transformers and Pillow, and the modules of tools/demo_model; imports nothing of Quire.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo_model"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import corpus
import pictures
import tokenizer as tokens
import torch
from muon import Muon
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor
from transformers import LlavaConfig, LlavaForConditionalGeneration, SiglipImageProcessorPil

DEMO_MODEL = Path(__file__).resolve().parents[2] / "launch" / "demo" / "model"
IMAGE, SIDE, PATCH = "<image>", 72, 12
ROWS = (SIDE // PATCH) ** 2
TOWER = {
    "model_type": "siglip_vision_model",
    "image_size": SIDE,
    "patch_size": PATCH,
    "hidden_size": 144,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vision_use_head": False,
}
CHATS, EARLY_CHATS, TEXTS = 16, 48, 2
"""Documents of a step with pictures, the same of early steps, and those without pictures."""
LONGEST_TEXT = 160
TEXT_SHARE = 0.3
"""Weight of the loss of documents without pictures."""
EARLY = 0.15
"""Share of the steps that have one question for each picture."""
PICTURES = 64
"""Pictures of a step of the tower alone."""
TOWER_RATE, RATE, GENTLE_RATE, VECTOR_SHARE = 0.01, 0.005, 0.0003, 0.4
SHARPNESS = 8.0
"""Score of a word whose direction in a patch's row is as long as an embedding."""
NAMES, COLORS = (*pictures.SHAPES, *"0123456789"), list(pictures.COLORS)
Log = Callable[[str], None]
WARM_UP, DECAY_FROM = 0.02, 0.4
STEPS_PER_LINE, STEPS_PER_CHECK = 20, 300
CHAT_TEMPLATE = tokens.CHAT_TEMPLATE.replace(
    "+ (message['content'] or '') }}",
    "}}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] or [] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}",
)


@dataclass(frozen=True)
class Sample:
    """A document's tokens, the loss weight of each, and its pictures `[3, SIDE, SIDE]`."""

    tokens: list[int]
    weights: list[float]
    images: list[Tensor]


@dataclass(frozen=True)
class Check:
    """A conversation that ends with a question, and the right answer."""

    kind: str
    images: list[Image.Image]
    prompt: str
    answer: str


class Writer:
    """Writes documents as tokens, as chat template and processor do it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._processor = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})

    def pixels(self, image: Image.Image) -> Tensor:
        """Return a picture as the tower takes it."""
        made: Any = self._processor(images=[image], return_tensors="pt")
        pixels: Tensor = made["pixel_values"][0]
        return pixels

    def sample(self, document: list[tuple[str, str]], images: list[Image.Image]) -> Sample:
        """Return the sample of a chat of (role, text)."""
        ids: list[int] = []
        weights: list[float] = []
        for role, text in document:
            head = self.encode(f"{tokens.IM_START}{role}\n")
            body = self.encode(f"{text}{tokens.IM_END}")
            ids += [*head, *body, *self.encode("\n")]
            weights += [0.0] * len(head) + [float(role == "assistant")] * len(body) + [0.0]
        return Sample(ids, weights, [self.pixels(image) for image in images])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with all those of its pictures."""
        found: list[int] = self.tokenizer.encode(text.replace(IMAGE, IMAGE * ROWS)).ids
        return found


def placed(rng: random.Random, ask: str, images: str) -> str:
    """Return a message: the question, with its pictures before or behind it."""
    ask = pictures.varied(rng, ask)
    return images + ask if rng.random() < 0.65 else ask + images


def conversation(rng: random.Random, is_early: bool) -> tuple[list[tuple[str, str]], list[Image.Image]]:
    """Draw a chat about one picture or two, of several questions; early ones describe a picture."""
    if is_early:
        thing = pictures.draw_thing(rng)
        ask, answer = pictures.description(rng, thing)
        return [("user", IMAGE + ask), ("assistant", answer)], [pictures.draw(rng, thing)[0]]
    first, second = pictures.draw_thing(rng), pictures.draw_thing(rng)
    document: list[tuple[str, str]] = []
    if rng.random() < 0.2:
        document.append(("system", rng.choice(corpus.SYSTEM_PROMPTS)))

    def ask(question: pictures.Exchange, images: str = "") -> None:
        document.extend((("user", placed(rng, question[0], images)), ("assistant", question[1])))

    kind = rng.random()
    if kind < 0.4:  # one picture
        ask(pictures.about(rng, first), IMAGE)
        for _ in range(rng.randint(1, 3)):
            ask(pictures.about(rng, first))
        return document, [pictures.draw(rng, first)[0]]
    images = [pictures.draw(rng, first)[0], pictures.draw(rng, second)[0]]
    if kind < 0.75:  # two in one message
        ask(pictures.about_two(rng, first, second), IMAGE * 2)
    else:  # the second one later
        ask(pictures.about(rng, first), IMAGE)
        ask(pictures.about(rng, second), IMAGE)
    for _ in range(rng.randint(1, 2)):
        ask(pictures.about_two(rng, first, second))
    return document, images


def batches(writer: Writer, rng: random.Random, num_early: int) -> Iterator[list[Sample]]:
    """Yield the samples of each step, with some chats of the demo model's corpus, so that it stays known."""
    texts = corpus.documents(rng.randrange(2**32), 10**9)
    for step in itertools.count():
        is_early = step < num_early
        samples = [writer.sample(*conversation(rng, is_early)) for _ in range(EARLY_CHATS if is_early else CHATS)]
        num_chats = len(samples)
        while len(samples) < num_chats + TEXTS:
            (found,) = tokens.encode_documents(writer.tokenizer, [next(texts)])
            if len(found.tokens) <= LONGEST_TEXT:
                samples.append(Sample(found.tokens, found.weights, []))
        yield samples


def batch_loss(model: LlavaForConditionalGeneration, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Return the loss of samples, and the mean loss of an answer's token in those with pictures."""
    length = max(len(sample.tokens) for sample in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.long)
    weights = torch.zeros(len(samples), length)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.tokens)] = torch.tensor(sample.tokens)
        weights[row, : len(sample.weights)] = torch.tensor(sample.weights)
    images = torch.stack([image for sample in samples for image in sample.images])
    # Rows end with padding, to which no earlier token attends: no mask is needed.
    made: Any = model.model(input_ids=ids, pixel_values=images, use_cache=False)
    counted = weights[:, 1:] > 0
    logits = model.lm_head(made.last_hidden_state[:, :-1][counted])
    losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:][counted], reduction="none")
    has_images = torch.tensor([bool(sample.images) for sample in samples])[:, None].expand_as(counted)[counted]
    return losses[has_images].mean() + TEXT_SHARE * losses[~has_images].mean(), losses[has_images].mean()


def make_model(start: Path, tokenizer: Tokenizer, pieces: dict[int, list[int]]) -> LlavaForConditionalGeneration:
    """Return the model of an earlier build, or the demo model behind a new tower."""
    text = json.loads((start / "config.json").read_text("utf-8"))
    if "vision_config" in text:
        found = LlavaForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
        assert isinstance(found, LlavaForConditionalGeneration)
        return found
    weights = load_file(str(start / "model.safetensors"))
    config = LlavaConfig(
        vision_config=TOWER,
        text_config={
            **text,
            "vocab_size": tokenizer.get_vocab_size(),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        image_token_index=tokenizer.token_to_id(IMAGE),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_seq_length=ROWS,
        multimodal_projector_bias=True,
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config).float()
    table = weights.pop("model.embed_tokens.weight").float()
    with torch.no_grad():
        target = model.model.language_model
        target.load_state_dict(
            {name.removeprefix("model."): value for name, value in weights.items() if "lm_head" not in name},
            strict=False,
        )
        target.embed_tokens.weight.zero_()
        target.embed_tokens.weight[: len(table)] = table
        for token, parts in pieces.items():
            target.embed_tokens.weight[token] = table[parts].mean(0)
        model.model.vision_tower.embeddings.position_embedding.weight.normal_(std=0.02)
    return model


def with_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[Tokenizer, dict[int, list[int]]]:
    """Make each word with a space before it a token of its own, and add the placeholder of pictures.

    Return the tokenizer, and for each new token the ids of what it was written with before.
    """
    content = json.loads(tokenizer.to_str())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    pieces: dict[int, list[int]] = {}
    for word in words:
        (whole, *rest) = tokenizer.encode(f" {word}").tokens
        for count, piece in enumerate(rest, 2):
            merges.append([whole, piece])
            whole += piece
            if whole not in vocab:
                vocab[whole] = len(vocab)
                pieces[vocab[whole]] = tokenizer.encode(f" {word}").ids[:count]
    made = Tokenizer.from_str(json.dumps(content))
    made.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    return made, pieces


def _labels(thing: pictures.Thing, place: pictures.Place) -> Tensor:
    """Return number of name and number of color of the thing in each patch, `[ROWS, 2]`; -1: not there."""
    side = SIDE // PATCH
    labels = torch.full((side, side, 2), -1)
    middles = (torch.arange(side) + 0.5) / side
    x, y, half_width, half_height = place
    inside = ((middles - y).abs() < half_height)[:, None] & ((middles - x).abs() < half_width)
    labels[inside] = torch.tensor([NAMES.index(thing.name), COLORS.index(thing.color)])
    return labels.view(ROWS, 2)


def train_tower(model: LlavaForConditionalGeneration, writer: Writer, steps: int, rng: random.Random, log: Log) -> None:
    """Train tower and projector to give each patch the embeddings of its thing's name and color, added.

    From answers alone a tower learns this in far more pictures: those about one color say little of each patch.
    """
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    head = torch.nn.Linear(TOWER["hidden_size"], len(NAMES) + len(COLORS))  # only to find the features sooner
    named = [*tower.named_parameters(), *projector.named_parameters(), *head.named_parameters(prefix="embed_head")]
    optimizer = Optimizer([(name, p) for name, p in named if "post_layernorm" not in name], TOWER_RATE)
    table = model.get_input_embeddings().weight.detach()
    words = [table[[writer.encode(f" {word}")[0] for word in group]] for group in (NAMES, COLORS)]
    # Of like words the differences count, which are small: without this the language model is slow to see them.
    words = [torch.nn.functional.normalize(group - group.mean(0), dim=1) for group in words]
    length = table.norm(dim=1).mean()
    started = time.monotonic()
    for step in range(1, steps + 1):
        images, labels = [], []
        for _ in range(PICTURES):
            thing = pictures.draw_thing(rng)
            image, place = pictures.draw(rng, thing)
            images.append(writer.pixels(image))
            labels.append(_labels(thing, place))
        features = tower(torch.stack(images), output_hidden_states=True).hidden_states[-1].flatten(0, 1)
        rows = projector(features)
        right = torch.stack(labels).flatten(0, 1)
        inside = right[:, 0] >= 0
        loss = 0.05 * rows[~inside].square().sum(1).mean() / length**2
        shares = []
        for kind, (group, direct) in enumerate(
            zip(words, head(features[inside]).split([len(NAMES), len(COLORS)], dim=1), strict=True)
        ):
            scores = rows[inside] @ group.T * (SHARPNESS / length)
            for found in (scores, direct):
                loss = loss + torch.nn.functional.cross_entropy(found, right[inside, kind])
            shares.append((scores.argmax(1) == right[inside, kind]).float().mean().item())
        optimizer.step(loss, step / steps)
        if step % STEPS_PER_LINE == 0:
            line = f"{time.monotonic() - started:6.0f} s  step {step:5d}  loss {loss.item():.4f}"
            log(f"{line}  names {shares[0]:.3f}, colors {shares[1]:.3f} of patches right")


class Optimizer:
    """Muon for matrices, AdamW for the rest, with rates that rise, stay, and fall to nothing."""

    def __init__(self, named: list[tuple[str, Tensor]], rate: float, gently: Sequence[Tensor] = ()) -> None:
        """``gently``: parameters that only AdamW changes, at ``GENTLE_RATE``."""
        self._all = [*(p for _, p in named), *gently]
        matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
        others = [p for name, p in named if p.dim() != 2 or "embed" in name]
        self._muon, self._rate = Muon(matrices), rate
        groups = [{"params": others}, {"params": list(gently)}] if gently else [{"params": others}]
        self._adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, loss: Tensor, progress: float) -> None:
        factor = min(1.0, progress / WARM_UP, max(0.0, (1.0 - progress) / (1.0 - DECAY_FROM)))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._all, 1.0)
        self._muon.step(self._rate * factor)
        for group, rate in zip(self._adam.param_groups, (VECTOR_SHARE * self._rate, GENTLE_RATE), strict=False):
            group["lr"] = rate * factor
        self._adam.step()
        for parameter in self._all:
            parameter.grad = None


def train(
    model: LlavaForConditionalGeneration,
    writer: Writer,
    steps: int,
    rng: random.Random,
    rate: float,
    whole: bool,
    log: Log,
    check: Callable[[], None],
) -> None:
    """Train the language model for a number of steps, the first of them with one question.

    The tower stays as it is: Muon's updates are of one length, so early ones, which are noise for it, would undo it.
    With ``whole`` it is trained gently, too, and all conversations may be long.
    """
    num_early = 0 if whole else int(EARLY * steps)
    seeing = [model.model.vision_tower, model.model.multi_modal_projector]
    gently = [p for part in seeing for name, p in part.named_parameters() if whole and "post_layernorm" not in name]
    for part in seeing:
        part.requires_grad_(whole)
    optimizer = Optimizer([*model.model.language_model.named_parameters()], RATE * rate, gently)
    started, mean = time.monotonic(), 0.0
    for step, samples in zip(range(1, steps + 1), batches(writer, rng, num_early), strict=False):
        loss, of_images = batch_loss(model, samples)
        optimizer.step(loss, step / steps)
        mean += of_images.item() / STEPS_PER_LINE
        if step % STEPS_PER_LINE == 0:
            times = f"{time.monotonic() - started:6.0f} s  {time.process_time():6.0f} CPU s"
            log(f"{times}  step {step:5d}  loss {mean:.4f}")
            mean = 0.0
        if step % STEPS_PER_CHECK == 0 and step < steps:
            check()


def make_checks(seed: int, count: int) -> list[Check]:
    """Return ``count`` checks of each kind; the pictures are none of the training's."""
    rng = random.Random(f"checks {seed}")
    checks: list[Check] = []
    for kind, make in pictures.KINDS.items():
        for _ in range(count):
            thing = pictures.draw_thing(rng)
            ask, answer = make(rng, thing)
            checks.append(Check(kind, [pictures.draw(rng, thing)[0]], placed(rng, ask, IMAGE), answer))
    for _ in range(count):
        first, second = pictures.draw_thing(rng), pictures.draw_thing(rng)
        ask, answer = pictures.about_two(rng, first, second)
        both = [pictures.draw(rng, first)[0], pictures.draw(rng, second)[0]]
        checks.append(Check("two pictures", both, placed(rng, ask, IMAGE * 2), answer))
    return checks


def report(model: LlavaForConditionalGeneration, writer: Writer, checks: list[Check], log: Log) -> None:
    """Answer the checks greedily; print some wrong answers, and how many of each kind are right."""
    right: dict[str, list[bool]] = {}
    wrong: list[str] = []
    ends = [tokens.IM_END_ID, tokens.END_OF_TEXT_ID]
    for check in checks:
        sample = writer.sample([("user", check.prompt)], check.images)
        ids = torch.tensor([[*sample.tokens, *writer.encode(f"{tokens.IM_START}assistant\n")]])
        with torch.inference_mode():
            made: Any = model.generate(  # type: ignore[operator]
                input_ids=ids,
                pixel_values=torch.stack(sample.images),
                do_sample=False,
                max_new_tokens=40,
                eos_token_id=ends,
                pad_token_id=tokens.END_OF_TEXT_ID,
                attention_mask=torch.ones_like(ids),
            )
        text = writer.tokenizer.decode(made[0, ids.shape[1] :].tolist())
        right.setdefault(check.kind, []).append(text == check.answer)
        if text != check.answer:
            wrong.append(f"  {check.prompt} {check.answer!r} != {text!r}")
    log("\n".join(wrong[:8]))
    log("; ".join(f"{kind} {sum(found)}/{len(found)}" for kind, found in right.items()))


def write_model(model: LlavaForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint: weights in bfloat16, settings, tokenizer, processor."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    tokens.write_tokenizer(tokenizer, folder)
    model.config.architectures = ["LlavaForConditionalGeneration"]
    model.config.dtype = "bfloat16"
    settings = model.config.to_diff_dict()
    generation = json.loads((DEMO_MODEL / "generation_config.json").read_text("utf-8"))
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE,
        "patch_size": PATCH,
        "vision_feature_select_strategy": "full",
        "num_additional_image_tokens": 0,
        "image_processor": SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}).to_dict()
        | {"image_processor_type": "SiglipImageProcessor"},
    }
    named = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    named["added_tokens_decoder"][str(tokenizer.token_to_id(IMAGE))] = {
        **named["added_tokens_decoder"]["0"],
        "content": IMAGE,
    }
    named |= {"chat_template": CHAT_TEMPLATE, "image_token": IMAGE, "processor_class": "LlavaProcessor"}
    for name, content in (
        ("config.json", settings),
        ("generation_config.json", generation),
        ("processor_config.json", processor),
        ("tokenizer_config.json", named),
    ):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Build Quire's demo model for images.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output directory")
    parser.add_argument(
        "--start", type=Path, default=DEMO_MODEL, metavar="DIR", help="model to begin with (the demo model)"
    )
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="training steps (1000)")
    parser.add_argument("--tower-steps", type=int, default=900, metavar="N", help="steps of the tower alone (900)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (0)")
    parser.add_argument("--rate", type=float, default=1.0, metavar="X", help="factor on the learning rates (1.0)")
    parser.add_argument("--whole", action="store_true", help="train the tower together with the language model")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = Tokenizer.from_file(str(arguments.start / "tokenizer.json"))
    tokenizer, pieces = with_words(tokenizer, [*pictures.SHAPES, *pictures.COLORS])
    writer = Writer(tokenizer)
    model = make_model(arguments.start, tokenizer, pieces)

    def log(line: str) -> None:
        print(line, flush=True)

    def check() -> None:
        write_model(model, tokenizer, arguments.out)
        report(model, writer, make_checks(arguments.seed, 10), log)

    sizes = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model.model.vision_tower.parameters())
    log(f"{sizes[0]} parameters, {sizes[1]} in the tower")
    if arguments.tower_steps:
        train_tower(model, writer, arguments.tower_steps, random.Random(arguments.seed), log)
        write_model(model, tokenizer, arguments.out)
    train(model, writer, arguments.steps, random.Random(arguments.seed), arguments.rate, arguments.whole, log, check)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    write_model(model, tokenizer, arguments.out)
    report(model, writer, make_checks(arguments.seed + 1, 40), log)


if __name__ == "__main__":
    main()
