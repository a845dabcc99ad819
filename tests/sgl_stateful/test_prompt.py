import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from facts import fact
from hypothesis import given
from hypothesis import strategies as st

from sgl_stateful.model_files import default_model_dir, is_complete
from sgl_stateful.prompt import SENTINEL, FactTokens, assemble, order_facts, render_fact, split_at_sentinel
from sgl_stateful.settings import StatefulSettings

DEMO = Path(__file__).parents[2] / "eval/locomo/data/demo_conversation.json"


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"time": "8 May, 2023", "speaker": "Ana", "text": "I moved to Porto."},
            "[8 May, 2023] Ana: I moved to Porto.\n",
        ),
        ({"speaker": "Ana", "text": "Hello"}, "Ana: Hello\n"),
        ({"time": "today", "text": "Hello"}, "[today] Hello\n"),
        ({"text": "  two\n\nlines\tand\u00a0more "}, "two lines and more\n"),
        ({"time": "", "speaker": "", "text": "Hello"}, "Hello\n"),
    ],
)
def test_a_fact_is_one_line(fields: dict[str, Any], line: str) -> None:
    assert render_fact(fact(1, **fields)) == line


segments = st.lists(st.integers(0, 99), max_size=6)


@given(
    segments, segments, st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), max_size=5), segments, segments
)
def test_every_block_holds_its_facts_ids(
    head: list[int], header: list[int], facts: list[list[int]], footer: list[int], tail: list[int]
) -> None:
    tokens = [FactTokens(fact(seq), tuple(token_ids)) for seq, token_ids in enumerate(facts)]
    prompt = assemble(head=head, header=header, facts=tokens, footer=footer, tail=tail)
    assert [block.fact for block in prompt.blocks] == tokens
    for block in prompt.blocks:
        assert prompt.token_ids[block.start : block.end] == list(block.fact.token_ids)
    if not facts:
        assert prompt.token_ids == head + tail
    else:
        assert prompt.token_ids == head + header + [i for token_ids in facts for i in token_ids] + footer + tail


def test_the_best_fact_stands_last_and_older_facts_after_newer_of_the_same_score() -> None:
    facts = [FactTokens(fact(seq), ()) for seq in (4, 1, 3, 2)]
    scores = [0.5, 0.9, 0.5, -0.2]
    assert [f.fact.seq for f in order_facts(facts, scores, "relevance_last")] == [2, 4, 3, 1]
    assert [f.fact.seq for f in order_facts(facts, scores, "chronological")] == [1, 2, 3, 4]
    assert order_facts([], [], "relevance_last") == []


def test_a_template_is_split_where_the_sentinel_stands() -> None:
    assert split_at_sentinel(f"a\n{SENTINEL}b") == ("a\n", "b")


@pytest.mark.parametrize("text", ["", "no marker", f"{SENTINEL} and {SENTINEL}"])
def test_a_template_without_one_sentinel_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"{text.count(SENTINEL)} times, not once"):
        split_at_sentinel(text)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    directory = default_model_dir(os.environ)
    if not is_complete(directory):
        pytest.skip(f"the demo model is not in {directory}: run scripts/setup")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def demo_lines() -> list[str]:
    conversation = json.loads(DEMO.read_text(encoding="utf-8"))[0]["conversation"]
    lines = []
    for key, turns in conversation.items():
        if isinstance(turns, list):
            date = conversation[f"{key}_date_time"]
            lines += [render_fact(fact(0, time=date, speaker=t["speaker"], text=t["text"])) for t in turns]
    return lines


def test_segments_tokenised_alone_are_what_the_whole_prompt_is_tokenised_to(tokenizer: Any) -> None:
    """The seams of real facts, in many orders, change no id of SmolLM2's: one newline token ends each segment."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    lines = demo_lines()
    assert len(lines) > 50
    head, _, tail = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{SENTINEL}What happened?"}], tokenize=False, add_generation_prompt=True
    ).partition(SENTINEL)
    header = StatefulSettings.model_fields["header"].default
    shuffled = random.Random(0)
    for _ in range(20):
        chosen = shuffled.sample(lines, 12)
        parts = [head, header, *chosen, tail]
        assert [i for part in parts for i in encode(part)] == encode("".join(parts))
