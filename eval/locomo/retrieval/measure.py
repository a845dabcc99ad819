"""Recall of every variant on the same questions, and how each differs from its baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from locomo.dataset import Conversation, Question
from locomo.retrieval.index import Hit
from locomo.retrieval.ranking import Asked, Search, Thread
from locomo.retrieval.units import Unit
from locomo.retrieval.variants import Variant, within_tokens
from locomo.scoring.recall import DEFAULT_KS, Recall, covered_turns, mean, repaired_recall
from locomo.scoring.statistics import Interval, interval_of_difference


@dataclass(frozen=True, slots=True)
class Corpus:
    """Conversations with the units that stand in the store, by sample id, and what each unit takes in tokens."""

    conversations: Sequence[Conversation]
    units: Mapping[str, Sequence[Unit]]
    tokens: Mapping[str, Mapping[str, int]]

    def asked(self, search: Search) -> list[tuple[Question, Asked]]:
        """Return every question that counts for repaired recall, ready to be ranked for."""
        pairs = []
        for conversation in self.conversations:
            thread = Thread(self.units[conversation.sample_id])
            for question in conversation.questions:
                if repaired_recall(question, ()) is not None:
                    owner, speakers = conversation.sample_id, conversation.speakers
                    pairs.append((question, Asked(question.question, owner, speakers, thread, search)))
        return pairs


class Outcome(NamedTuple):
    """Repaired recall of one variant: per k, one value per question, in the corpus's order."""

    variant: Variant
    samples: list[str]
    recalls: dict[int, list[Recall]]

    def means(self) -> dict[int, Recall]:
        """Mean over all questions, per k."""
        return {k: mean(recalls) for k, recalls in self.recalls.items()}

    def column(self, k: int) -> list[float]:
        """All-evidence recall at k of every question."""
        return [recall.all for recall in self.recalls[k]]

    def difference(self, other: Outcome, k: int) -> Interval:
        """All-evidence recall at k less that of `other`, with its interval over conversations."""
        return interval_of_difference(self.column(k), other.column(k), self.samples)


def remembering(search: Search) -> Search:
    """Return a search that asks for each thing once."""
    held: dict[tuple[object, ...], list[Hit]] = {}

    def find(owner: str, query: str, *, k: int, mode: str, where: Mapping[str, object] | None = None) -> list[Hit]:
        key = (owner, query, k, mode, tuple((where or {}).items()))
        if key not in held:
            held[key] = search(owner, query, k=k, mode=mode, where=where)
        return held[key]

    return find


def measure(
    corpus: Corpus,
    variants: Sequence[Variant],
    search: Search,
    *,
    ks: Sequence[int] = DEFAULT_KS,
    on_progress: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Rank for every question by every variant; `on_progress` is called after each question."""
    asked = corpus.asked(remembering(search))
    outcomes = [Outcome(v, [question.sample_id for question, _ in asked], {k: [] for k in ks}) for v in variants]
    for question, about in asked:
        rankings = {variant.name: variant.ranking(about) for variant in variants}
        covers = {unit.id: unit.covers for unit in corpus.units[about.owner]}
        tokens = corpus.tokens[about.owner]
        for outcome in outcomes:
            variant = outcome.variant
            for k in ks:
                if variant.budget == "tokens":
                    budget = sum(tokens[unit] for unit in rankings[variant.baseline][:k])
                    taken = within_tokens(rankings[variant.name], budget, tokens.__getitem__)
                else:
                    taken = rankings[variant.name][:k]
                recall = repaired_recall(question, covered_turns(taken, covers))
                assert recall is not None, f"{question.sample_id} {question.index} does not count"
                outcome.recalls[k].append(recall)
        on_progress()
    return outcomes


def chosen_elsewhere(candidates: Sequence[Outcome], k: int, *, name: str) -> Outcome:
    """Return, for each conversation, the candidate that is best at k on the others: no setting sees its own test.

    Parameters
    ----------
    candidates
        Outcomes on the same questions; of equal ones the first is chosen.
    name
        Of the outcome that is returned.
    """
    samples = candidates[0].samples
    found: dict[int, list[Recall]] = {depth: list(recalls) for depth, recalls in candidates[0].recalls.items()}
    for sample in dict.fromkeys(samples):
        elsewhere = [place for place, other in enumerate(samples) if other != sample]
        best = max(candidates, key=lambda outcome: sum(outcome.recalls[k][place].all for place in elsewhere))
        for depth, recalls in best.recalls.items():
            for place, of in enumerate(samples):
                if of == sample:
                    found[depth][place] = recalls[place]
    first = candidates[0].variant
    return Outcome(Variant(name, first.ranker, first.baseline), samples, found)
