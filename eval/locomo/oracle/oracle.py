"""The oracle itself: have a prompt served with its facts spliced, and compute the same with the reference model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from locomo.errors import OracleError

from .comparison import Difference, compare
from .layout import SplicedFact, lay_out
from .reference import ReferenceModel
from .serving import OracleClient, Placement, Served
from .subject import Subject


@dataclass(frozen=True, slots=True)
class Asked:
    """A served prompt, and what each of its spliced facts saw while it was encoded."""

    served: Served
    spliced: tuple[SplicedFact, ...]

    @property
    def spliced_tokens(self) -> int:
        """Tokens that were spliced."""
        return sum(fact.end - fact.start for fact in self.spliced)

    @property
    def seen_tokens(self) -> int:
        """Tokens that stood in front of the spliced facts while they were encoded, each as often as it was seen."""
        return sum(len(fact.seen_ids) for fact in self.spliced)


class SpliceOracle:
    """Holds one server against the reference model.

    Parameters
    ----------
    top
        Tokens that the server lists behind each token of a prompt; of those that it decodes it lists all.
    steps
        Length of the answer that is decoded, and then forced, tokens; 0 compares the prompt's tail alone.
    """

    def __init__(self, client: OracleClient, reference: ReferenceModel, *, top: int, steps: int) -> None:
        assert top >= 1, top
        assert steps >= 0, steps
        self._client = client
        self._reference = reference
        self._top = top
        self._steps = steps

    def ask(
        self, subject: Subject, placement: Placement, fact_ids: Sequence[str], *, policy: str, repair: str = "none"
    ) -> Asked:
        """Have facts served, in this order, in front of the subject's question.

        ``repair`` says which of their tokens the server computes anew, as a request does.

        Raises
        ------
        OracleError
            A fact has no encoding that says which tokens it has; or the server did not splice, or spliced other
            tokens than it has encodings of.
        ServerFailed
        """
        versions = self._client.versions(subject.owner, fact_ids)
        # A fact without an encoding under this policy is computed in its place; another policy knows its tokens.
        tokens = subject.encodings.token_ids(versions)
        if missing := [fact.id for fact in versions if fact.id not in tokens]:
            raise OracleError(f"no encoding says which tokens these facts have: {missing}")
        chosen = subject.encodings.served(versions, policy, context=subject.context)
        # From an empty cache: what it holds exactly comes before any splice, and a splice is found there again.
        self._client.flush_cache()
        served = self._client.serve(
            subject.templates[placement],
            [(fact.id, tokens[fact.id]) for fact in versions],
            owner=subject.owner,
            policy=policy,
            repair=repair,
            steps=self._steps,
            top=self._top,
            vocab=self._reference.vocab_size,
        )
        orders = subject.encodings.orders(versions, policy) if "share:" in repair else [None] * len(versions)
        spliced = tuple(
            # What its encoding saw in front of a part of a fact is the rest of the fact, too.
            SplicedFact(start + part.start, start + part.stop, (*seen.seen_ids, *seen.token_ids[: part.start]))
            for start, seen, parts in zip(served.starts, chosen, _spliced_parts(repair, served, orders), strict=True)
            if seen is not None
            for part in parts
        )
        asked = Asked(served, spliced)
        if (told := served.report["tokens"]["spliced"]) != asked.spliced_tokens:
            raise OracleError(
                f"the server spliced {told} tokens of the {asked.spliced_tokens} that it has encodings of"
            )
        return asked

    def compare(self, asked: Asked, *, shifts: Mapping[int, int] | None = None) -> Difference:
        """Compare what was served with one forward of the reference.

        ``shifts`` moves spliced facts, by their number, away from where they were served: a control, which must not
        agree.
        """
        facts = [replace(fact, shift=(shifts or {}).get(i, 0)) for i, fact in enumerate(asked.spliced)]
        first = asked.served.block_end
        rows = range(first, len(asked.served.prompt_ids))
        log_probs = self._reference.log_probs(lay_out(asked.served.prompt_ids, facts), rows).numpy()
        distributions = asked.served.distributions
        return compare(distributions, log_probs, [distribution.position - first for distribution in distributions])


def _spliced_parts(repair: str, served: Served, orders: Sequence[Sequence[int] | None]) -> list[list[range]]:
    """The runs of each fact that are not computed anew.

    That are not among its first M tokens, the last N (or P per cent, rounded up) of all, or the first P per cent of its
    order; of which, where it has an order, those of one token are computed too.
    """
    counts = {kind: count for kind, _, count in (part.partition(":") for part in repair.split("+"))}
    first, last, share = (counts.get(kind, "0") for kind in ("first", "last", "share"))
    ends = [*served.starts[1:], served.block_end]
    tokens = served.block_end - served.starts[0]
    stop = served.block_end - (-(-tokens * int(last[:-1]) // 100) if last.endswith("%") else int(last))
    found = []
    for start, end, order in zip(served.starts, ends, orders, strict=True):
        kept = [int(first) <= token and start + token < stop for token in range(end - start)]
        for token in () if order is None else order[: -(-(end - start) * int(share.rstrip("%")) // 100)]:
            kept[token] = False
        framed = [False, *kept, False]
        edges = [token for token in range(len(kept) + 1) if framed[token] != framed[token + 1]]
        runs = [range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        found.append([run for run in runs if order is None or len(run) > 1])
    return found
