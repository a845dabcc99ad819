"""Named slots of a template, ``{{bed}}``, and the data that fills them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sgl_stateful.errors import BadFlashRequest, FlashSlotMissing
from sgl_stateful.sessions.content import Content

Value = str | int | float

_SLOT = re.compile(r"\{\{([A-Za-z_][A-Za-z0-9_]*)\}\}")
_OF_THE_SERVER = "memory"  # where facts go in a prompt that is text


def slots_of(content: Content) -> set[str]:
    """Names of the slots in a question's text, or in the text of its messages."""
    found: set[str] = set()
    _walk(content.text, found)
    _walk(content.messages, found)
    return found


def fill(content: Content, data: Mapping[str, Value]) -> Content:
    """The question with data in its slots.

    What is filled in is not looked at again: data that looks like a slot stays what it is.

    Raises
    ------
    FlashSlotMissing
        A slot without data, or data without a slot.
    BadFlashRequest
        A slot has the name that the server uses for the place of facts.
    """
    if _OF_THE_SERVER in data:
        raise BadFlashRequest("a slot cannot be called 'memory': that is the place of facts")
    slots = slots_of(content)
    if missing := sorted(slots - data.keys()):
        raise FlashSlotMissing(f"there is no data for {', '.join(missing)}")
    if idle := sorted(data.keys() - slots):
        raise FlashSlotMissing(f"no slot of the question takes {', '.join(idle)}")
    if not slots:
        return content
    values = {name: str(value) for name, value in data.items()}
    messages = None if content.messages is None else tuple(_filled(message, values) for message in content.messages)
    return replace(content, text=_filled(content.text, values), messages=messages)


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _SLOT.sub(lambda slot: values.get(slot[1], slot[0]), value)
    if isinstance(value, Mapping):
        return {name: _filled(one, values) for name, one in value.items()}
    return [_filled(one, values) for one in value] if isinstance(value, list | tuple) else value


def _walk(value: Any, found: set[str]) -> None:
    if isinstance(value, str):
        found.update(name for name in _SLOT.findall(value) if name != _OF_THE_SERVER)
    elif isinstance(value, Mapping):
        for one in value.values():
            _walk(one, found)
    elif isinstance(value, list | tuple):
        for one in value:
            _walk(one, found)
