"""Generates the table in docs/coming_from.md that says what becomes of each key of SkyRL here.

SkyRL's keys and defaults are in tests/carrying_over/keys.yaml. To find what becomes of a key, this tool loads the key
with its default. Run it as `python -m tools.key_table`; a test fails if the page is stale.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

from rl_core.config import Config, ConfigWarning, from_mapping
from rl_core.config.keys import ALIASES
from rl_core.config.layers import file_layer
from rl_core.config.resolving import value_at
from rl_core.errors import Mistakes, RLError

ROOT = Path(__file__).parent.parent
KEYS = ROOT / "tests" / "carrying_over" / "keys.yaml"
PAGE = ROOT / "docs" / "coming_from.md"
BEGIN, END = "<!-- keys: made by python -m tools.key_table -->\n", "<!-- end of keys -->\n"
_CONTEXT = {"generator.inference_engine.backend": "vllm"}
"""Makes the keys of the vLLM engine known."""
_PATHS = ("trainer.ckpt_path", "trainer.export_path")
"""Keys whose defaults are derived from other keys here, so the table shows no default."""
_BACKEND_SECTION = re.compile(r"trainer\.\w+\.(fsdp|megatron)_config\.")
"""Matches keys of backends. A `Config` does not contain their defaults; docs/configuration.md lists them."""
_SOURCE = re.compile(r" \(code(, with .*?)?\)\.?$")


def outcome(key: str, value: Any) -> str:
    """Returns what the configuration does with a key and a value, worded for the table.

    Raises RLError for an unknown key, or a value of the wrong type.
    """
    context = {name: given for name, given in _CONTEXT.items() if name != key}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = from_mapping({**context, key: value})
        except RLError as error:
            reason = _without_source(str(error).partition(": ")[2])
            if reason.startswith("is not a key here; use "):
                return f"refused: use `{reason.removeprefix('is not a key here; use ')}`"
            if reason.startswith("not supported by this version: "):
                return f"refused: {reason.removeprefix('not supported by this version: ')}"
            raise
    for warning in caught:
        said = _without_source(str(warning.message).removeprefix(f"{key}: "))
        if warning.category is ConfigWarning and said.startswith("has no effect and can be removed: "):
            return f"no effect: {said.removeprefix('has no effect and can be removed: ')}"
        if found := re.fullmatch(r"is called (\S+) here and was read as that key", said):
            return f"→ `{found[1]}`"
    if key in ALIASES:
        return f"→ `{ALIASES[key]}`"
    return f"the same{_default_here(key, value, config)}"


def _default_here(key: str, value: Any, config: Config) -> str:
    """Names this project's default, or its name for the value, if that differs from SkyRL's; otherwise returns an empty
    text."""
    if _BACKEND_SECTION.match(key):
        return ""
    context = {name: given for name, given in _CONTEXT.items() if name != key}
    given, here = value_at(config, key), value_at(from_mapping(context), key)
    if given != value and isinstance(given, str) and not str(value).startswith("~"):
        return f"; the value is called `{given}` here"
    return "" if here == given or key in _PATHS else f"; default here `{json.dumps(here)}`"


def row(key: str, value: Any) -> str:
    """The table's row for one key."""
    said = outcome(key, value)
    if said.startswith("no effect: ") and outcome(key, _another(value)).startswith("refused: "):
        said = f"no effect at the default, else refused: {said.removeprefix('no effect: ')}"
    return f"| `{key}` | `{_cell(json.dumps(value))}` | {_cell(said)} |"


def keys() -> dict[str, Any]:
    """SkyRL's keys → their defaults in SkyRL."""
    return {key: given.value for key, given in file_layer(KEYS, Mistakes())}


def table() -> str:
    """The whole table."""
    lines = [row(key, value) for key, value in keys().items()]
    return "\n".join(["", "| key there | default there | here |", "|---|---|---|", *lines, "", ""])


def page(text: str) -> str:
    """The page with a newly generated table."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return {"another": 1} if isinstance(value, dict) else "another"


def _without_source(text: str) -> str:
    return _SOURCE.sub("", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
