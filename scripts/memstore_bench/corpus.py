"""The facts and the questions that every arm gets, with their vectors."""

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memstore.embedding import Embedder, Vectors, unit_rows

OWNER = "bench"
NUM_EMBEDDED = 4000
NUM_QUESTIONS = 256
NUM_BUCKETS = 100
# Length of the noise that is added to a unit row: the cosine with what it was made of is about 0.94.
_NOISE = 0.35

_SYLLABLES = ("mi", "re", "lo", "ta", "sken", "vo", "ri", "dal", "ke", "na", "shu", "per", "bo", "lin", "gar", "we")
_ACTIONS = (
    "repaired the old bicycle of {other}",
    "planted {number} tomato seedlings behind the shed",
    "lost a silver ring while swimming",
    "started to learn the cello from {other}",
    "baked rye bread with caraway and forgot the salt",
    "sold the blue van for {number} crowns",
    "missed the last ferry and slept at the harbour",
    "finished a quilt for the newborn of {other}",
    "painted the kitchen yellow against the advice of {other}",
    "adopted a three-legged cat called Pepper",
    "ran {number} kilometres before breakfast",
    "dreamt about a flooded library",
    "wrote a letter to the council about the broken bridge",
    "broke a wrist on the climbing wall",
    "gave a lecture on mosses to {number} students",
    "borrowed a telescope from {other} and never saw Saturn",
    "stopped drinking coffee for {number} days",
    "found a wallet and carried it to the police",
    "argued with {other} about the rent",
    "cooked mushroom soup for {number} guests",
    "signed the contract for the workshop with {other}",
    "watched herons at the reservoir with {other}",
    "forgot the birthday of {other}",
    "translated a poem for the wedding of {other}",
    "changed the dentist after {number} years",
    "bought two tickets for the puppet theatre",
    "is allergic to walnuts and told {other} so",
    "moved the beehives away from the road",
    "won a chess game against {other} in {number} moves",
    "carved a spoon out of plum wood",
    "planned a hike over the ridge with {other}",
    "returned the drill that {other} had lent",
)
_PLACES = (
    "Oldharbour", "Brinefield", "Upper Tessel", "Karrow", "Lindmoor", "Saltmarsh", "Quillon", "Easterby", "Dunmere",
    "Fallowhill", "Norwick Bay", "Pellstone", "Greyford", "Harrowgate Mill", "Vintry", "Ashcombe",
)  # fmt: skip
_MONTHS = ("January", "March", "April", "May", "June", "August", "September", "October", "November", "December")


class Corpus:
    """`num_facts` distinct facts, and questions, with unit vectors `[n, dimension]`; the same in every run.

    The first 4,000 vectors are the embedder's own; each later one is one of those with seeded noise, since embedding
    100,000 texts would take longer than the whole bench.

    Parameters
    ----------
    cache
        Directory for the embedder's rows, which are the same in every run.
    """

    def __init__(self, num_facts: int, *, embedder: Embedder, cache: Path) -> None:
        made = random.Random(0)
        distinct: dict[str, None] = {}
        while len(distinct) < max(num_facts, NUM_EMBEDDED):
            distinct[_sentence(made)] = None
        self.texts = list(distinct)[:num_facts]
        # Of a generator of their own: the same for every `num_facts`.
        asked = random.Random(1)
        self.questions = [_question(asked) for _ in range(NUM_QUESTIONS)]
        real = _embedded([*list(distinct)[:NUM_EMBEDDED], *self.questions], embedder=embedder, cache=cache)
        self.question_rows = real[NUM_EMBEDDED:]
        self.rows = _derived(real[:NUM_EMBEDDED], num_facts)

    def save(self, directory: Path) -> None:
        """Write what the child process reads."""
        np.save(directory / "rows.npy", self.rows)
        np.save(directory / "question_rows.npy", self.question_rows)
        (directory / "corpus.json").write_text(json.dumps({"texts": self.texts, "questions": self.questions}))

    def best(self, num_questions: int, k: int, *, num_facts: int) -> list[list[int]]:
        """Return, of the first `num_facts`, the `k` nearest to each of the first questions, by products in float64."""
        queries = self.question_rows[:num_questions].astype(np.float64)
        scores = np.empty((num_questions, num_facts))
        for start in range(0, num_facts, 8192):
            stop = min(start + 8192, num_facts)
            scores[:, start:stop] = queries @ self.rows[start:stop].astype(np.float64).T
        best = []
        for of_question in scores:
            nearest = np.argpartition(-of_question, k - 1)[:k]
            best.append([int(fact) for fact in nearest[np.lexsort((nearest, -of_question[nearest]))]])
        return best


class KnownTextEmbedder:
    """Looks up the vectors of the corpus; other texts go to the model."""

    def __init__(self, corpus: Corpus, model: Embedder) -> None:
        self._model = model
        self._rows = corpus.rows
        self._known = {text: i for i, text in enumerate(corpus.texts)}
        self.dimension = model.dimension
        self.fingerprint = model.fingerprint
        self.max_tokens = model.max_tokens

    def count_tokens(self, text: str) -> int:
        """Of a known text, which are all short, without running the tokenizer."""
        return len(text.split()) + 2 if text in self._known else self._model.count_tokens(text)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one unit row per text."""
        if all(text in self._known for text in texts):
            return self._rows[[self._known[text] for text in texts]]
        return self._model.embed(texts)


def metadata_of(fact: int) -> dict[str, int]:
    """One percent of the facts share a `bucket`, half of them a `half`."""
    return {"bucket": fact % NUM_BUCKETS, "half": fact % 2}


def fresh_text(number: int) -> str:
    """Return a text of the usual length that is not in the corpus, another one for each number."""
    return f"{_sentence(random.Random(1_000_000 + number))} That was visit {number}."


def fresh_question(number: int) -> str:
    """Return a question that no embedder has seen."""
    return f"{_question(random.Random(2_000_000 + number))} I ask for the {number}th time."


def _sentence(made: random.Random) -> str:
    action = made.choice(_ACTIONS).format(other=_person(made), number=made.randint(2, 90))
    when = f"on {made.randint(1, 28)} {made.choice(_MONTHS)} {made.randint(2012, 2025)}"
    return f"{_person(made)} {action} in {made.choice(_PLACES)} {when}."


def _question(made: random.Random) -> str:
    action = made.choice(_ACTIONS).format(other=_person(made), number=made.randint(2, 90))
    return f"When was it that {_person(made)} {action} in {made.choice(_PLACES)}?"


def _person(made: random.Random) -> str:
    return f"{_name(made)} {_name(made)}"


def _name(made: random.Random) -> str:
    return "".join(made.choices(_SYLLABLES, k=2)).capitalize()


def _embedded(texts: list[str], *, embedder: Embedder, cache: Path) -> Vectors:
    digest = hashlib.sha256(json.dumps([embedder.fingerprint, texts]).encode()).hexdigest()[:16]
    path = cache / f"rows-{digest}.npy"
    if not path.exists():
        rows = [embedder.embed(texts[start : start + 64]) for start in range(0, len(texts), 64)]
        cache.mkdir(parents=True, exist_ok=True)
        np.save(path.with_suffix(".part.npy"), np.concatenate(rows))
        path.with_suffix(".part.npy").replace(path)
    loaded: Vectors = np.load(path)
    return loaded


def _derived(real: Vectors, num_facts: int) -> Vectors:
    dimension = real.shape[1]
    noise = np.random.default_rng(0)
    rows = real[np.arange(num_facts) % len(real)].copy()
    later = rows[len(real) :]
    later += noise.standard_normal(later.shape, dtype=np.float32) * np.float32(_NOISE / np.sqrt(dimension))
    # Twice: a unit row divided by its length is not always itself.
    rows = unit_rows(rows, rows=len(rows), dimension=dimension)
    return unit_rows(rows, rows=len(rows), dimension=dimension)
