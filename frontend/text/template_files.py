"""Finds the chat templates of a checkpoint: one, or several by name of which transformers chooses one."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.frontend.text.template_helper import TemplateHelper
from quire.protocol.errors import ConfigError
from quire.protocol.model.config_fields import read_json


def load_template(folder: Path, config: Mapping[str, Any], source: str) -> TemplateHelper | None:
    """Load the chat template: ``source`` if not empty, else that of files, else that of tokenizer_config.json.

    As in transformers, the files are chat_template.jinja, the default, and additional_chat_templates/NAME.jinja; the
    template ``tool_use`` is for requests with tools; and without a default, others are refused. Processors of images
    had chat_template.json before.
    """
    where, variables = folder / "tokenizer_config.json", special_variables(config)
    if source:
        return TemplateHelper(source, variables, "--chat-template")
    paths = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (path := folder / "chat_template.jinja").is_file():
        paths["default"] = path
    elif (path := folder / "chat_template.json").is_file():
        where, config = path, read_json(path)
    named = {} if paths else _named(config.get("chat_template"), where)
    for name, path in paths.items():
        try:
            named[name] = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            raise ConfigError(f"{path}: cannot be read as text") from None
    if not named:
        return None
    refusal = f"this model has no default template, only {', '.join(sorted(named))}: use --chat-template"
    default = named.get("default", f"{{{{ raise_exception({json.dumps(refusal)}) }}}}")
    if "tool_use" in named:
        # Expressions keep the blanks at both ends, which a block would take; Jinja drops a template's last newline.
        one, other = (re.sub(r"(\r\n|\r|\n)\Z", "", text) for text in (named["tool_use"], default))
        ends = "{{ '' }}"
        default = f"{{% if tools is not none %}}{ends}{one}{ends}{{% else %}}{ends}{other}{ends}{{% endif %}}"
    names = "" if list(named) == ["default"] else f" ({', '.join(sorted(named))})"
    return TemplateHelper(default, variables, f"{paths.get('default', where)}{names}")


def _named(value: Any, path: Path) -> dict[str, str]:
    """Return the templates of ``tokenizer_config.json`` by name: a text is the default, a list gives names."""
    if value is None or isinstance(value, str):
        return {} if value is None else {"default": value}
    named: dict[str, str] = {}
    for item in value if isinstance(value, list) else [None]:
        name, source = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise ConfigError(f"{path}: chat_template must be a template or a list of named templates")
        named[name] = source
    return named


def special_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Return ``bos_token`` and similar template variables, given as strings or as objects with a ``content``."""
    variables: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            variables[name] = content
    return variables
