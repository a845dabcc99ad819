"""Numbers that others published. Nothing here was measured by this repository."""

from __future__ import annotations

from .contents import Section, Table, number, text

# LLM-judge accuracy in percent at k = 50, category ids 1 to 4: spliced with w = 0, 5, 20, 50, then the same as text.
JUDGE_ACCURACY = {
    "Llama-3.1-8B": (53.8, 56.8, 59.2, 60.3, 63.3),
    "Mistral-7B": (37.2, 56.5, 58.2, 58.3, 64.4),
    "Qwen2.5-7B": (50.5, 57.4, 58.6, 58.8, 64.6),
}
# Milliseconds to the first token of InferScale's engine: k, spliced, as text.
TTFT_MS = ((5, 16.6, 33.2), (50, 17.3, 68.3))


def published() -> Section:
    """Two tables of published results, and why they cannot be read against the tables above."""
    lead = [
        "Not measured here. Source of both tables: InferScale's published results; the column Mem0 is the same facts "
        "put into the prompt as text, as Mem0 does.",
        "Other models, another judge, other facts, another retriever and other hardware: set a number of these tables "
        "beside one of this page and the difference says nothing. With an equal retriever in front of both, the "
        "published end-to-end advantage of splicing is about 1.4×.",
    ]
    accuracy = Table(
        "Published: LLM-judge accuracy in percent, k = 50, category ids 1 to 4",
        ["Model", "InferScale, w=0", "w=5", "w=20", "w=50", "Mem0: facts as text"],
        [[text(model), *(number(value, 1) for value in values)] for model, values in JUDGE_ACCURACY.items()],
    )
    speed = Table(
        "Published: time to first token in ms, InferScale's engine",
        ["k", "Spliced", "As text"],
        [[number(k, 0), number(spliced, 1), number(as_text, 1)] for k, spliced, as_text in TTFT_MS],
    )
    return Section("published", "Published by others", lead, [accuracy, speed], kind="published")
