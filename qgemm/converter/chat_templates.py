"""The chat templates of a Hugging Face folder: one text, or several with names of which "default" is the usual one.

tokenizer_config.json holds them under "chat_template"; else they are files, chat_template.jinja with
additional_chat_templates/NAME.jinja, or "chat_template" in chat_template.json.
"""

from __future__ import annotations

import os
import re
from typing import Any

from qgemm.errors import CheckpointError
from qgemm.files.documents import text_file, tokenizer_object
from qgemm.files.paths import shown, shown_path, system_errors

KEY, DEFAULT = "chat_template", "default"
CONFIG, TEMPLATE, TEMPLATE_JSON = "tokenizer_config.json", "chat_template.jinja", "chat_template.json"
MORE, JINJA = "additional_chat_templates", ".jinja"
MAX_TEMPLATES = 256


def chat_templates(folder: str) -> dict[str, str]:
    """Name -> template, {} where the folder has none. Characters of a name that no key has become "_"."""
    for name in (CONFIG, TEMPLATE, TEMPLATE_JSON):
        path = os.path.join(folder, name)
        if not os.path.lexists(path):
            continue
        if name == TEMPLATE:
            return _named(shown_path(path), {DEFAULT: text_file(path), **_more(os.path.join(folder, MORE))})
        value = tokenizer_object(path).get(KEY)
        if value is not None:
            return _named(f"{shown_path(path)}: {KEY}", value)
    return {}


def _more(folder: str) -> dict[str, str]:
    """The templates in the files of a folder, by the names of the files."""
    if not os.path.isdir(folder):
        return {}
    with system_errors(folder, "read"):
        names = sorted(name for name in os.listdir(folder) if name.endswith(JINJA))
    return {name.removesuffix(JINJA): text_file(os.path.join(folder, name)) for name in names[: MAX_TEMPLATES + 1]}


def _named(where: str, value: Any) -> dict[str, str]:
    """The templates of a text, of an object NAME -> text, or of a list of objects with name and template."""
    if isinstance(value, str):
        pairs: list[tuple[Any, Any]] = [(DEFAULT, value)]
    elif isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        pairs = [(entry.get("name"), entry.get("template")) for entry in value]
    else:
        raise CheckpointError(f"{where}: {shown(str(value))} is no template, nor several with names")
    if len(pairs) > MAX_TEMPLATES:
        raise CheckpointError(f"{where}: more than {MAX_TEMPLATES} templates")
    templates: dict[str, str] = {}
    for name, template in pairs:
        if not isinstance(name, str) or not name or not isinstance(template, str):
            raise CheckpointError(f"{where}: {shown(str(name))}: {shown(str(template))} is no template with a name")
        key = re.sub("[^A-Za-z0-9]", "_", name)
        if key in templates:
            raise CheckpointError(f"{where}: two templates are called {shown(key)}")
        templates[key] = template
    return templates
