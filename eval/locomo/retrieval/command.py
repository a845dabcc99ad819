"""``python -m locomo.retrieval``: recall of evidence by our own search, and what may be added to it."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from locomo.dataset import Conversation, file_sha256, load
from locomo.errors import LocomoError, ScoringError
from locomo.retrieval.cache import CachedEmbedder
from locomo.retrieval.index import UnitIndex
from locomo.retrieval.latency import measure_latency
from locomo.retrieval.measure import Corpus, chosen_elsewhere, measure
from locomo.retrieval.reference import PUBLISHED_SHA256, points_off
from locomo.retrieval.results import Row, outcome_rows, outcome_table, reference_rows
from locomo.retrieval.units import UnitKind, UnitText, covers_of, units_of
from locomo.retrieval.variants import FUSION_WEIGHTS, REFERENCE, SERVED, boost_grid, fusion_name, variants
from locomo.scoring.recall import DEFAULT_KS, repaired_recall, repaired_table, strict_table
from memstore import MemStoreError, SentenceTransformerEmbedder
from memstore.embedding import Embedder

Track = Callable[[str, int], Callable[[int], None]]
"""Starts a bar of so many steps and returns what moves it on."""

BAR_UNITS = UnitKind.OBSERVATIONS
_K = 10
_TABLE_WIDTH = 200


def retrieval(
    data: Annotated[Path, typer.Option("--data", envvar="LOCOMO_DATA", help="LoCoMo's file, or one in its schema.")],
    cache: Annotated[Path, typer.Option(help="Directory of vectors, kept from run to run.")],
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    text: Annotated[UnitText, typer.Option(help="What of a unit is embedded and indexed.")] = UnitText.DATED,
    captions: Annotated[bool, typer.Option(help="With the captions of the turns' images.")] = False,
    one_stream: Annotated[
        bool, typer.Option("--one-stream", help="A conversation is one stream to the store, as in `locomo run`.")
    ] = False,
    timed: Annotated[int, typer.Option(min=0, help="Queries that are timed; 0 leaves the times out.")] = 50,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the timed queries.")] = 5,
) -> None:
    """Measure recall of evidence for turns and observations; print one table."""
    console = Console()
    if json_out is not None and not json_out.absolute().parent.is_dir():
        _fail(f"there is no directory {json_out.absolute().parent} to write {json_out.name} into")
    try:
        conversations, digest = load(data), file_sha256(data)
        with CachedEmbedder(SentenceTransformerEmbedder(threads=1), cache) as embedder, _tracking() as track:
            rows = [
                row
                for kind in UnitKind
                for row in measure_units(
                    conversations,
                    kind,
                    embedder=embedder,
                    text=text,
                    captions=captions,
                    one_stream=one_stream,
                    timed=timed,
                    rounds=rounds,
                    track=track,
                    save=embedder.save,
                )
            ]
    except (LocomoError, MemStoreError) as error:
        _fail(str(error))
    # No narrower than its longest line, where it goes to a file too.
    Console(width=max(console.width, _TABLE_WIDTH)).print(outcome_table([row for row in rows if "variant" in row]))
    figures = bars(rows)
    if text is UnitText.DATED and not captions and digest == PUBLISHED_SHA256:
        figures["points_off_the_reference"] = points_off(rows)
        console.print(f"greatest distance from the reference: {figures['points_off_the_reference']:.2f} points")
    if json_out is not None:
        config = {
            "text": text.value,
            "captions": captions,
            "one_stream": one_stream,
            "data_sha256": digest,
            "embedder": embedder.fingerprint,
        }
        try:
            json_out.write_text(json.dumps({"bars": figures, "config": config, "rows": rows}, indent=1) + "\n")
        except OSError as error:
            _fail(f"the figures cannot be written: {error}")
        console.print(f"figures written to {json_out}")


def measure_units(
    conversations: list[Conversation],
    kind: UnitKind,
    *,
    embedder: Embedder,
    text: UnitText,
    captions: bool,
    one_stream: bool = False,
    timed: int,
    rounds: int,
    track: Track,
    save: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Put all units of one kind into a store, search for every question, and return the rows.

    Parameters
    ----------
    save
        Called when every unit has been embedded, and when every question has.

    Raises
    ------
    ScoringError
        No question counts: none of ids 1 to 4 has evidence.
    """
    # What has no visible character is no fact.
    units = {
        conversation.sample_id: [
            unit for unit in units_of(conversation, kind, text=text, captions=captions) if unit.text.strip()
        ]
        for conversation in conversations
    }
    if not any(repaired_recall(q, ()) for conversation in conversations for q in conversation.questions):
        raise ScoringError("no question of ids 1 to 4 has evidence: there is nothing to recall")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="locomo-retrieval-")))
        index = stack.enter_context(UnitIndex(folder, embedder, text=text, one_stream=one_stream))
        added = track(f"adding {kind.value}", sum(map(len, units.values())))
        for owner, of_owner in units.items():
            index.fill(owner, of_owner, on_progress=added)
        save()
        tokens = {owner: {u.id: embedder.count_tokens(u.text) for u in of_owner} for owner, of_owner in units.items()}
        corpus, compared, grid = Corpus(conversations, units, tokens), variants(), boost_grid()
        asked = corpus.asked(index.search)
        searched = track(f"searching {kind.value}", len(asked))
        outcomes = measure(corpus, [*compared, *grid], index.search, on_progress=lambda: searched(1))
        save()
        swept = [outcome for outcome in outcomes if outcome.variant.name in map(fusion_name, FUSION_WEIGHTS)]
        outcomes.append(chosen_elsewhere(swept, _K, name="scores, keyword chosen on the other conversations"))
        boosted = [outcome for outcome in outcomes if outcome.variant in grid]
        outcomes.append(chosen_elsewhere(boosted, _K, name="boosts chosen on the other conversations"))
        latencies = {}
        if timed:
            ticked = track(f"timing {kind.value}", min(timed, len(asked)) * (rounds + 1))
            abouts = [about for _, about in asked]
            latencies = measure_latency(abouts, compared, queries=timed, rounds=rounds, on_progress=lambda: ticked(1))
        found = [
            (question, [hit.unit for hit in index.search(conversation.sample_id, question.question, k=max(DEFAULT_KS))])
            for conversation in conversations
            for question in conversation.questions
        ]
        covers = covers_of(units)
    tables = (table(found, covers=covers) for table in (strict_table, repaired_table))
    return [*reference_rows(kind, *tables), *outcome_rows(kind, outcomes, latencies)]


def bars(rows: list[Row]) -> dict[str, float]:
    """The figure of merit: all-evidence recall at 10 over observations, as served, and by vector alone."""
    [row] = [row for row in rows if row.get("variant") == SERVED and row["units"] == BAR_UNITS.value]
    [plain] = [row for row in rows if row.get("variant") == REFERENCE and row["units"] == BAR_UNITS.value]
    return {
        "recall_all_at_10": row["recall"]["all"][str(_K)],
        "recall_all_at_10_reference": plain["recall"]["all"][str(_K)],
    }


def _fail(message: str) -> NoReturn:
    print(f"retrieval: {message}", file=sys.stderr)
    raise typer.Exit(1)


@contextmanager
def _tracking() -> Iterator[Track]:
    """Progress bars on standard error, while open."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def start(title: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(title, total=total)
            return lambda steps: progress.advance(task, steps)

        yield start
