"""Reads how a checkpoint makes vectors and scores: from the files of sentence-transformers, or from ``config.json``.

sentence-transformers lists the parts of a model in ``modules.json``. Two lists are supported: Transformer, Pooling and
possibly Normalize for vectors; Transformer alone or with LogitScore for the scores of a cross-encoder.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

import msgspec

from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.checkpoint_links import check_links
from quire.protocol.model.config_fields import Fields, read_json, read_json_list
from quire.protocol.model.encoder_config import EncoderConfig
from quire.protocol.model.pooling_config import PoolingConfig, PoolingTask

Pooling = Literal["last", "mean", "cls"]
POOLING_FLAGS = ("auto", "none", "last", "mean", "cls")
"""Values of the flag ``--pooling``."""

MODULES = "modules.json"
SENTENCE_TRANSFORMERS = "config_sentence_transformers.json"
TRANSFORMER = "sentence_bert_config.json"
_EMBEDDING: list[PoolingTask] = ["embed", "token_embed"]
_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SUPPORTED = "supported: Transformer, then Pooling and possibly Normalize, or nothing or LogitScore for a CrossEncoder"
_KINDS = ("SentenceTransformer", "CrossEncoder")
_MOST_LABELS = 2**16
_FORMATS = ("flat", "structured")
_NOT_VARIABLES = frozenset(
    ("messages", "documents", "tools", "chat_template", "continue_final_message", "restore_suffix", "tokenize")
) | {"max_length", "padding", "truncation", "return_tensors", "return_dict"}
"""Parameters of ``apply_chat_template`` and sentence-transformers that are not variables of a template."""


class Shape(Protocol):
    """What this module reads of a ``ModelConfig``, which is read with its functions."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def generates(self) -> bool: ...
    @property
    def encoder(self) -> EncoderConfig | None: ...
    @property
    def pooling(self) -> PoolingConfig | None: ...


_Model = TypeVar("_Model", bound=Shape)


def with_pooling(model: _Model, pooling: str) -> _Model:
    """Return the model with the pooling of the flag ``--pooling``, one of POOLING_FLAGS.

    With ``auto`` a checkpoint's own configuration is used. ``none`` switches it off. Any other value sets the hidden
    state that vectors are made of; a model without a configuration then embeds, normalised to length 1.

    Raises:
        ConfigError: the value contradicts the checkpoint, which has no head for tokens, or has one for labels.
    """
    if pooling == "auto":
        return model
    if pooling == "none":
        if not model.generates:
            raise ConfigError("--pooling none: the checkpoint has no head for tokens, and cannot generate: omit it")
        return _replaced(model, None)
    kind = cast(Pooling, pooling)
    own = model.pooling
    if own is None:
        own = PoolingConfig(tasks=_EMBEDDING, size=model.hidden_size)
    elif "embed" not in own.tasks:
        raise ConfigError(f"--pooling {pooling}: the checkpoint classifies, and makes no vectors: omit the flag")
    return _replaced(model, msgspec.structs.replace(own, pooling=kind))


def _replaced(model: _Model, pooling: PoolingConfig | None) -> _Model:
    changed: _Model = msgspec.structs.replace(cast(Any, model), pooling=pooling)
    return changed


def scores_by_tokens(raw: dict[str, Any]) -> bool:
    """Whether ``config.json`` says that logits of tokens are the scores (``classifier_from_token``, vLLM's field)."""
    return raw.get("classifier_from_token") is not None


def read_pooling(folder: Path, raw: dict[str, Any], model: Shape) -> PoolingConfig | None:
    """Return the pooling of a checkpoint, or None if no file has a configuration and the model generates.

    Args:
        raw: the decoded ``config.json``.
        model: the shape of the model.

    Raises:
        ConfigError: one line that names the file and the field.
    """
    has_labels = raw["architectures"][0].endswith("ForSequenceClassification")
    has_modules = (folder / MODULES).is_file()
    if model.generates and not (has_modules or has_labels or scores_by_tokens(raw)):
        return None
    fields, files = Fields(raw, str(folder / "config.json")), _Files(folder)
    if has_modules:
        modules = _modules(folder)
        kinds = [kind for kind, _ in modules]
        task = files.transformer.raw.get("transformer_task") or "feature-extraction"
        if kinds[1:] in (["Pooling"], ["Pooling", "Normalize"]) and task == "feature-extraction":
            return _embedding(folder, modules, files, fields, model)
        if kinds[1:] == ["LogitScore"] and task == "text-generation":
            return _yes_no(_fields_of(folder, modules[1]), files, fields, model)
        if kinds[1:] or not has_labels:
            raise ConfigError(
                f"{folder / MODULES}: modules {', '.join(kinds)} with transformer_task {printable(task)} are not "
                f"supported; {_SUPPORTED}"
            )
    elif scores_by_tokens(raw):
        return _from_tokens(folder, files, fields, model)
    if has_labels:
        return _classification(files, fields, model)
    # sentence-transformers takes the mean too, for a model without a configuration and without a head for tokens.
    return _sized(files, fields, model, "mean", normalize=True)


class _Files:
    """The files of sentence-transformers for the whole model; an absent one has no fields."""

    def __init__(self, folder: Path) -> None:
        self.whole = _optional(folder / SENTENCE_TRANSFORMERS)
        self.transformer = _optional(folder / TRANSFORMER)
        self.tokenizer = _optional(folder / "tokenizer_config.json")
        self.whole.choice("model_type", self.whole.raw.get("model_type", _KINDS[0]), _KINDS)

    def common(self, model: Shape) -> dict[str, Any]:
        """Return the fields of PoolingConfig that all kinds of models have."""
        longest = self.transformer.raw.get("max_seq_length")
        if longest is None:
            # Tokenizers without a limit have 1e30, some of them as a float.
            limit = self.tokenizer.raw.get("model_max_length")
            limit = limit if isinstance(limit, int | float) and not isinstance(limit, bool) else 0
            longest = int(limit) if 1 <= limit < model.max_position else 0
        else:
            longest = self.transformer.size("max_seq_length", high=2**31 - 1)
        prompts = self.whole.raw.get("prompts") or {}
        if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
            raise ConfigError(f"{self.whole.where}: prompts must be an object of texts")
        default = self.whole.raw.get("default_prompt_name") or ""
        if default and default not in prompts:
            names = ", ".join(prompts) or "none"
            raise ConfigError(
                f"{self.whole.where}: default_prompt_name {printable(default)} is not among prompts: {names}"
            )
        return {
            "max_tokens": 0 if longest >= model.max_position else longest,
            "lowercase": self.transformer.flag("do_lower_case"),
            "prompts": {name: text or "" for name, text in prompts.items()},
            "default_prompt": default,
            **self._messages(),
        }

    def _messages(self) -> dict[str, Any]:
        """Return the fields of PoolingConfig about the chat template, with which the library renders every text."""
        own = self.transformer
        message = own.part("modality_config").raw.get("message")
        if message is None:
            return {}
        form = message.get("format") if isinstance(message, dict) else None
        name, variables = "processing_kwargs.chat_template", own.part("processing_kwargs").part("chat_template").raw
        if not all(isinstance(each, bool | str) or _is_small(each) for each in variables.values()):
            raise ConfigError(f"{own.where}: {name} must be an object of texts, integers and booleans")
        for each in sorted(_NOT_VARIABLES & variables.keys()):
            raise ConfigError(f"{own.where}: {name}.{each} is not supported: only variables of the template are")
        return {
            "message_format": own.choice("modality_config.message.format", form, _FORMATS),
            "template_variables": variables,
        }


def _is_small(value: object) -> bool:
    return isinstance(value, int) and abs(value) < 2**53


def _optional(path: Path) -> Fields:
    return Fields(read_json(path) if path.is_file() else {}, str(path))


def _fields_of(folder: Path, module: tuple[str, str]) -> Fields:
    """Return the fields of a module. Normalize had no file in earlier versions of the library."""
    path = folder / module[1] / "config.json"
    return _optional(path) if module[0] == "Normalize" else Fields(read_json(path), str(path))


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return the class name and folder of each module; the first one is Transformer, in the folder of the model."""
    path = folder / MODULES
    entries = read_json_list(path)
    modules = []
    for entry in entries:
        kind = entry.get("type") if isinstance(entry, dict) else None
        part = entry.get("path") if isinstance(entry, dict) else None
        if not isinstance(kind, str) or not isinstance(part, str):
            raise ConfigError(f"{path}: each module must be an object with the texts type and path")
        if part and (Path(part).name != part or part == ".."):
            raise ConfigError(f"{path}: path {printable(part)} must be the name of a folder in the checkpoint")
        check_links(folder, part)
        modules.append((kind.rpartition(".")[2], part))
    if not modules or modules[0] != ("Transformer", ""):
        raise ConfigError(f'{path}: the first module must be Transformer with the path "": {_SUPPORTED}')
    return modules


def _embedding(
    folder: Path, modules: Sequence[tuple[str, str]], files: _Files, fields: Fields, model: Shape
) -> PoolingConfig:
    """Return the pooling of a bi-encoder with the module Pooling."""
    own = _fields_of(folder, modules[1])
    for module in modules[2:]:
        normalize = _fields_of(folder, module)
        source = normalize.raw.get("module_input_name", "sentence_embedding")
        normalize.choice("module_input_name", source, ("sentence_embedding",))
    name = "embedding_dimension" if own.has("embedding_dimension") else "word_embedding_dimension"
    if own.size(name) != model.hidden_size:
        raise ConfigError(
            f"{own.where}: {name} must be the model's hidden_size {model.hidden_size} (got {own.size(name)})"
        )
    modes = own.raw.get("pooling_mode")
    if modes is None:
        modes = [mode for field, mode in _OLD_MODES.items() if own.flag(field)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1:
        raise ConfigError(
            f"{own.where}: pooling_mode {printable(modes)} is not supported; supported: {', '.join(_MODES)}"
        )
    pooling = _MODES[own.choice("pooling_mode", modes[0], tuple(_MODES))]
    if pooling != "last" and not own.flag("include_prompt", default=True):
        raise ConfigError(f"{own.where}: include_prompt false is supported only for the pooling_mode lasttoken")
    return _sized(files, fields, model, pooling, normalize=len(modules) > 2)


def _sized(files: _Files, fields: Fields, model: Shape, pooling: Pooling, *, normalize: bool) -> PoolingConfig:
    """Return the pooling of a model that embeds, with the sizes that its vectors may have."""
    size = files.whole.size("truncate_dim", default=model.hidden_size, high=model.hidden_size)
    cuts = fields.integers("matryoshka_dimensions", high=size)
    if 0 in cuts:
        raise ConfigError(f"{fields.where}: matryoshka_dimensions must be a list of integers from 1 to {size}")
    if not cuts and fields.has("is_matryoshka") and not fields.flag("is_matryoshka"):
        cuts = [size]
    return PoolingConfig(
        tasks=_EMBEDDING,
        pooling=pooling,
        normalize=normalize,
        size=model.hidden_size,
        truncate_dim=size if size < model.hidden_size else 0,
        matryoshka_dimensions=sorted(set(cuts)),
        **files.common(model),
    )


def _classification(files: _Files, fields: Fields, model: Shape) -> PoolingConfig:
    """Return the pooling of a model with a head for labels, whose names transformers keeps in ``id2label``."""
    names = fields.raw.get("id2label")
    if names is None:
        names = {
            str(index): f"LABEL_{index}" for index in range(fields.size("num_labels", default=2, high=_MOST_LABELS))
        }
    count = len(names) if isinstance(names, dict) else 0
    if not 1 <= count <= _MOST_LABELS or not all(isinstance(names.get(str(index)), str) for index in range(count)):
        raise ConfigError(f"{fields.where}: id2label must have a name for each label from 0 on")
    labels = [names[str(index)] for index in range(count)]
    return PoolingConfig(
        tasks=["classify"],
        pooling="last" if model.encoder is None else model.encoder.classifier_pooling,
        size=model.hidden_size,
        labels=labels,
        activation=_activation(files, fields, count),
        **files.common(model),
    )


def _activation(files: _Files, fields: Fields, num_labels: int) -> Literal["", "sigmoid", "softmax"]:
    """Return the activation of a classification: the one that CrossEncoder has saved, or its default.

    CrossEncoder saves Identity for several labels, and leaves the softmax to each call. Probabilities are the default
    here; a request without activation gets the logits.
    """
    saved = fields.raw.get("sentence_transformers")
    name = files.whole.raw.get("activation_fn")
    where, field = files.whole.where, "activation_fn"
    if name is None and isinstance(saved, dict):
        name, where = saved.get("activation_fn"), fields.where
    if name is None:
        field, where = "sbert_ce_default_activation_function", fields.where
        name = fields.raw.get(field)
    if name is None:
        several = fields.raw.get("problem_type") == "multi_label_classification"
        return "sigmoid" if num_labels == 1 or several else "softmax"
    kind = name.rpartition(".")[2] if isinstance(name, str) else ""
    if kind == "Sigmoid":
        return "sigmoid"
    if kind not in ("Identity", "Softmax"):
        raise ConfigError(f"{where}: {field} {printable(name)} is not supported; supported: Sigmoid, Identity, Softmax")
    return "" if num_labels == 1 else "softmax"


def _yes_no(own: Fields, files: _Files, fields: Fields, model: Shape) -> PoolingConfig:
    """Return the pooling of a CrossEncoder whose score is the difference of two tokens' logits (LogitScore)."""
    own.choice("module_input_name", own.raw.get("module_input_name", "causal_logits"), ("causal_logits",))
    high = model.vocab_size - 1
    tokens = [own.size("true_token_id", low=0, high=high)]
    if own.has("false_token_id"):
        tokens.insert(0, own.size("false_token_id", low=0, high=high))
    return _of_tokens(tokens, files, fields, model)


def _from_tokens(folder: Path, files: _Files, fields: Fields, model: Shape) -> PoolingConfig:
    """Return the pooling of a checkpoint with vLLM's field ``classifier_from_token``: one token, or no and yes."""
    words = fields.raw["classifier_from_token"]
    if not isinstance(words, list) or len(words) not in (1, 2) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{fields.where}: classifier_from_token must be a list of one or two tokens")
    default = "no_post_processing" if len(words) == 1 else "from_2_way_softmax"
    fields.choice("method", fields.raw.get("method") or default, (default,))
    from tokenizers import Tokenizer  # only these checkpoints need it here

    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other type
        raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    ids = []
    for word in words:
        token = tokenizer.token_to_id(word)
        if token is None or token >= model.vocab_size:
            raise ConfigError(
                f"{fields.where}: classifier_from_token {printable(word)} is not a token of the model's vocabulary"
            )
        ids.append(token)
    return _of_tokens(ids, files, fields, model)


def _of_tokens(tokens: list[int], files: _Files, fields: Fields, model: Shape) -> PoolingConfig:
    if not model.generates:
        raise ConfigError(f"{fields.where}: scores by the logits of tokens need a model with a head for tokens")
    return PoolingConfig(
        tasks=["classify"],
        size=model.hidden_size,
        labels=["LABEL_0"],
        activation=_activation(files, fields, 1),
        label_token_ids=tokens,
        **files.common(model),
    )
