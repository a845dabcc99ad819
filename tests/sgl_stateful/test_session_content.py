"""Contents as token ids, against what the chat template makes of the whole conversation."""

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoTokenizer
from words import ByteTokenizer

from sgl_stateful.errors import BadSessionRequest
from sgl_stateful.model_files import default_model_dir, is_complete
from sgl_stateful.sessions.content import BEFORE, MARK, Content, Renderer

Messages = tuple[Mapping[str, Any], ...]

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ALTERNATES = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[ask]{{ m.content }}[/ask]{% else %}{{ m.content }};{% endif %}"
    "{% endfor %}"
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<system>Be kind.</>{% endif %}" + PLAIN
NEEDS_USER = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('no question') }}{% endif %}" + PLAIN
)
STRIPS_THOUGHTS = (
    "{% set ns = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role != 'assistant' %}{{ m.content }}"
    "{% elif loop.index0 < ns.asked %}{{ m.content.split('(thinks)')[-1] }}"
    "{% else %}{{ m.content if '(thinks)' in m.content else '(thinks)' + m.content }}{% endif %}"
    "</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MERGES_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "[ask]{% if loop.index0 == 1 and messages[0].role == 'system' %}({{ messages[0].content }}) {% endif %}"
    "{{ m.content }}[/ask]"
    "{% elif m.role == 'assistant' %}{{ m.content }};{% endif %}{% endfor %}"
)


class TemplateTokenizer(ByteTokenizer):
    """Renders a template as transformers does, and counts the messages that it is given."""

    def __init__(self, template: str | None) -> None:
        self.chat_template = template
        self.rendered = 0
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = self._raise
        self._template = environment.from_string(template or "")

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        self.rendered += len(conversation)
        return str(self._template.render(messages=conversation, add_generation_prompt=add_generation_prompt))

    @staticmethod
    def _raise(message: str) -> None:
        raise ValueError(message)


def renderer(template: str | None) -> Renderer:
    return Renderer(TemplateTokenizer(template), vocab_size=300)


def message(role: str, content: str) -> Mapping[str, Any]:
    return {"role": role, "content": content}


def conversation(turns: int) -> Messages:
    return tuple(message("user" if n % 2 == 0 else "assistant", f"message {n}") for n in range(turns))


def texts(template: str, messages: Messages, *, is_first: bool) -> list[str]:
    parts = renderer(template).data(Content(messages=messages), is_first=is_first)
    return [ByteTokenizer().decode(part) for part in parts]


SYSTEM = message("system", "You are a clerk.")
THOUGHTFUL: Messages = (
    message("user", "a"),
    message("assistant", "hm(thinks)b"),
    message("user", "c"),
    message("assistant", "oh(thinks)d"),
)


# ---- messages ----


@pytest.mark.parametrize(
    ("template", "messages", "pieces"),
    [
        (PLAIN, (SYSTEM, *conversation(1)), ["<system>You are a clerk.</>", "<user>message 0</>"]),
        (PLAIN, (message("user", "a"), message("user", "b")), ["<user>a</>", "<user>b</>"]),
        (ALTERNATES, conversation(4), ["[ask]message 0[/ask]", "message 1;", "[ask]message 2[/ask]", "message 3;"]),
        (DEFAULT_SYSTEM, conversation(2), ["<system>Be kind.</><user>message 0</>", "<assistant>message 1</>"]),
        (NEEDS_USER, (SYSTEM, *conversation(1)), ["<system>You are a clerk.</>", "<user>message 0</>"]),
        (STRIPS_THOUGHTS, THOUGHTFUL, ["<user>a</>", "<assistant>b</>", "<user>c</>", "<assistant>oh(thinks)d</>"]),
        (STRIPS_THOUGHTS, conversation(3), ["<user>message 0</>", "<assistant>message 1</>", "<user>message 2</>"]),
        (MERGES_SYSTEM, (SYSTEM, *conversation(1)), ["[ask](You are a clerk.) message 0[/ask]"]),
    ],
)
def test_a_conversation_is_divided_into_its_messages(template: str, messages: Messages, pieces: list[str]) -> None:
    shown = TemplateTokenizer(template).apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    assert "".join(pieces) == shown
    assert texts(template, messages, is_first=True) == pieces


@pytest.mark.parametrize("template", [PLAIN, ALTERNATES, DEFAULT_SYSTEM, NEEDS_USER, STRIPS_THOUGHTS])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_behind_a_session_there_are_the_new_messages_alone(template: str, count: int) -> None:
    shown = TemplateTokenizer(template).apply_chat_template(
        [*BEFORE, *conversation(count)], tokenize=False, add_generation_prompt=False
    )
    parts = texts(template, conversation(count), is_first=False)
    assert shown.endswith(MARK + renderer(template).closing_text() + "".join(parts))
    assert len(parts) == count
    assert all(f"message {n}" in part for n, part in enumerate(parts))


def test_a_template_that_needs_the_messages_together_gets_one_piece() -> None:
    numbered = "{% for m in messages %}{{ loop.index }}:{{ m.content }};{% endfor %}"
    whole = "1:message 0;2:message 1;3:message 2;4:message 3;5:message 4;"
    assert texts(numbered, conversation(5), is_first=True) == [whole]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("template", [PLAIN, STRIPS_THOUGHTS])
def test_many_messages_are_rendered_a_few_times_each(template: str, is_first: bool) -> None:
    tokenizer = TemplateTokenizer(template)
    parts = Renderer(tokenizer, vocab_size=300).data(Content(messages=conversation(500)), is_first=is_first)
    assert len(parts) == 500
    assert tokenizer.rendered < 10 * 500


def test_messages_that_cannot_be_rendered_are_refused() -> None:
    with pytest.raises(BadSessionRequest, match="roles must alternate"):
        texts(ALTERNATES, (message("user", "a"), message("user", "b")), is_first=True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content }}",  # shows no answer
        "{% for m in messages %}{{ m.content }}{{ '.' if loop.last else ',' }}{% endfor %}",  # ends it in two ways
        PLAIN + "{% for m in messages %}{{ m.content }}{% endfor %}",  # shows it twice
    ],
)
def test_a_template_that_is_not_local_is_refused_behind_a_session(template: str) -> None:
    tokenizer = TemplateTokenizer(template)
    made = Renderer(tokenizer, vocab_size=300)
    shown = tokenizer.apply_chat_template([*BEFORE, *conversation(1)], tokenize=False, add_generation_prompt=True)
    with pytest.raises(BadSessionRequest, match="does not render messages one by one"):
        made.behind(shown)
    with pytest.raises(BadSessionRequest, match="does not render messages one by one"):
        made.data(Content(messages=conversation(1)), is_first=False)


@pytest.fixture(scope="module")
def smollm() -> Any:
    directory = default_model_dir(os.environ)
    if not is_complete(directory):
        pytest.skip("the model is not here")
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


@pytest.mark.parametrize("messages", [conversation(6), (SYSTEM, *conversation(5)), conversation(1)])
def test_a_real_tokenizer_gives_the_ids_of_the_whole(smollm: Any, messages: Messages) -> None:
    made = Renderer(smollm, vocab_size=len(smollm))

    def whole(shown: Sequence[Mapping[str, Any]]) -> list[int]:
        text = smollm.apply_chat_template(list(shown), tokenize=False, add_generation_prompt=False)
        return list(smollm.encode(text, add_special_tokens=False))

    parts = made.data(Content(messages=messages), is_first=True)
    assert list(chain(*parts)) == whole(messages)
    assert [smollm.decode(part).count("<|im_end|>") for part in parts[1:]] == [1] * (len(messages) - 1)
    behind = made.data(Content(messages=messages), is_first=False)
    assert len(behind) == len(messages)
    assert whole([*BEFORE, *messages]) == [*whole(BEFORE), *chain(*behind)]


# ---- at first sight ----


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (Content(text=""), "nothing in it"),
        (Content(messages=()), "nothing in it"),
        (Content(input_ids=()), "nothing in it"),
        (Content(input_ids=(1, 300)), r"input_ids\[1\] is 300"),
        (Content(input_ids=(1, 2, -1)), r"input_ids\[2\] is -1"),
        (Content(text="a\ud800"), "cannot be tokenised"),
    ],
)
def test_what_is_wrong_at_first_sight_is_refused(content: Content, why: str) -> None:
    with pytest.raises(BadSessionRequest, match=why):
        renderer(PLAIN).check(content)


def test_messages_need_a_template() -> None:
    with pytest.raises(BadSessionRequest, match="no chat template"):
        renderer(None).check(Content(messages=conversation(1)))


@pytest.mark.parametrize("content", [Content(text="a"), Content(messages=conversation(1)), Content(input_ids=(0, 299))])
def test_what_is_right_is_not(content: Content) -> None:
    renderer(PLAIN).check(content)


def test_the_size_of_a_content() -> None:
    made = renderer(PLAIN)
    assert made.size(Content(text="x" * 70)) == 70
    assert made.size(Content(input_ids=(1, 2, 3))) == 3
    nested = {"role": "user", "content": [{"type": "text", "text": "x" * 9000}]}
    assert made.size(Content(messages=(nested,))) > 9000
    assert made.size(Content(messages=conversation(100))) > 20 * made.size(Content(messages=conversation(2)))


# ---- answers ----

EOS = 0


def ids(value: str) -> list[int]:
    return list(value.encode())


@pytest.mark.parametrize(
    ("generated", "seen", "stopped_by", "kept"),
    [
        ("yes", "yes", None, "yes"),  # its length
        ("yes\0", "yes", EOS, "yes"),
        ("yes\nQ", "yes\nQ", EOS, "yes\nQ"),  # the end did not come with the ids
        ("\0", "", EOS, ""),
        ("yes\nQ:", "yes", "\nQ:", "yes"),
        ("Q:", "", "Q:", ""),
        ("yes", "yes", "!", "yes"),
    ],
)
def test_an_answer_is_kept_as_the_caller_saw_it(generated: str, seen: str, stopped_by: Any, kept: str) -> None:
    made = renderer(PLAIN)
    assert made.answer(ids(generated), seen, stopped_by=stopped_by, is_chat=False) == ids(kept)
    assert made.answer(ids(generated), seen, stopped_by=stopped_by, is_chat=True) == ids(kept + "</>")


def test_a_stop_string_that_begins_inside_a_token(smollm: Any) -> None:
    made = Renderer(smollm, vocab_size=len(smollm))
    generated = smollm.encode("The answer is hello", add_special_tokens=False)
    kept = made.answer(generated, "The answer is hel", stopped_by="lo", is_chat=False)
    assert smollm.decode(kept) == "The answer is hel"
    assert made.answer(generated, "The answer", stopped_by=" is", is_chat=False) == generated[:2]


def test_a_turn_of_a_real_chat_is_what_the_template_makes_of_it(smollm: Any) -> None:
    made = Renderer(smollm, vocab_size=len(smollm))
    asked = (SYSTEM, message("user", "Is it open?"))
    answer = smollm.encode("Yes.", add_special_tokens=False)
    kept = [
        *made.question(Content(messages=asked), is_first=True),
        *made.answer([*answer, smollm.eos_token_id], "Yes.", stopped_by=smollm.eos_token_id, is_chat=True),
    ]
    assert smollm.decode(kept) == smollm.apply_chat_template([*asked, message("assistant", "Yes.")], tokenize=False)
