"""What the oracle must know of one owner before it can ask: the prompts around their facts, and what is encoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from locomo.errors import OracleError
from memstore import KVBlobs

from .encodings import StoredEncodings, check_context
from .serving import OracleClient, Placement, Template


@dataclass(frozen=True, slots=True)
class Subject:
    """An owner's facts on one server, and a question that is asked behind them.

    Attributes
    ----------
    templates
        The prompt around the facts, by their placement.
    context
        Tokens in front of every encoding of this server.
    """

    owner: str
    templates: Mapping[Placement, Template]
    context: tuple[int, ...]
    encodings: StoredEncodings


def read_subject(client: OracleClient, blobs: KVBlobs, *, owner: str, fact_id: str, question: str) -> Subject:
    """Learn of an owner, of whom ``fact_id`` is one encoded fact, all that the oracle must know.

    Facts are encoded behind a fresh conversation's prompt up to where facts go at the tail, and the header.

    Raises
    ------
    OracleError
        The fact has no encoding, the chat route's prompts cannot be taken apart, or the server encodes behind other
        tokens.
    ServerFailed
    """
    status = client.status()
    encodings = StoredEncodings(blobs, owner=owner, fingerprint=status["fingerprint"], policies=status["policies"])
    (fact,) = client.versions(owner, [fact_id])
    if (token_ids := encodings.token_ids([fact]).get(fact.id)) is None:
        raise OracleError(f"fact {fact.id} of {owner!r} has no encoding yet")
    placements: tuple[Placement, ...] = ("system", "tail")
    templates = {at: client.template(question, (fact.id, token_ids), owner=owner, placement=at) for at in placements}
    context = (*templates["tail"].head, *templates["tail"].header)
    check_context(context, fingerprint=status["fingerprint"], model_fingerprint=status["model"]["fact_fingerprint"])
    return Subject(owner, templates, context, encodings)
