"""The demo: one conversation, served as text and as spliced facts, timed and compared side by side."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from locomo.client import Answer, MemoryClient
from locomo.dataset import Category, Conversation, demo_conversation_path, load
from locomo.errors import LocomoError
from locomo.fidelity import kl_divergence, mean_kl, top1
from locomo.server import ServerProcess

console = Console(stderr=False)

DEFAULT_POLICY, BARE_HEADER = "ladder:live+4+32", "window:0"
POLICIES = (DEFAULT_POLICY, "anchor:4", "window:16", BARE_HEADER)
_TOP = 1000  # tokens of each distribution; the rest is pooled
_STEPS = 12
_FIDELITY_K = 10
_WARM_UPS = 3
_SENTINEL = "\ue000question\ue000"


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    data: Annotated[
        Path | None, typer.Option(help="A file in LoCoMo's schema; by default the shipped example.")
    ] = None,
    conversation: Annotated[int, typer.Option(min=0, help="Which conversation of the file.")] = 0,
    owner: Annotated[str, typer.Option(help="Owner of the facts.")] = "demo",
    question: Annotated[str | None, typer.Option(help="Ask this instead of the file's questions.")] = None,
    k: Annotated[str, typer.Option(help="Numbers of facts, comma-separated.")] = "0,5,10,20,50",
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each arm.")] = 5,
    fidelity_questions: Annotated[int, typer.Option(min=0, help="Questions of the KL table; 0 leaves it out.")] = 24,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Serve one conversation as text and as spliced facts; print times, divergence and answers side by side."""
    try:
        ks = sorted({int(part) for part in k.split(",")})
        sample = load(data or demo_conversation_path())[conversation]
    except (LocomoError, ValueError, IndexError) as error:
        _fail(f"{error}" if not isinstance(error, IndexError) else f"there is no conversation {conversation}")
    questions = [question] if question else _questions(sample)
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sgl-stateful-demo-")))
            console.print(f"starting the server (log: {folder / 'server.log'}) ...")
            server = stack.enter_context(
                ServerProcess(
                    model,
                    folder / "memory",
                    flags=[
                        "--policy",
                        POLICIES[0],
                        "--also-encode",
                        ",".join(POLICIES[1:]),
                        "--max-total-tokens",
                        "20000",
                    ],
                    log=folder / "server.log",
                )
            )
            client = MemoryClient(server.url)
            stack.callback(client.close)
            with _progress(f"encoding {len(sample.turns)} turns under {len(POLICIES)} policies") as update:
                client.ingest(sample, owner=owner, on_progress=update)
            rows = measure_times(client, owner, questions, ks=ks, runs=runs)
            ask_both(client, owner, question or questions[-1], rows)
            prompts = _Prompts(model)
            fidelity = (
                measure_fidelity(client, owner, questions[:fidelity_questions], prompts, k=_FIDELITY_K)
                if fidelity_questions
                else {}
            )
            k_largest = max(ks)
            at_largest = (
                measure_fidelity(client, owner, questions[: max(fidelity_questions // 4, 1)], prompts, k=k_largest)
                if fidelity_questions and k_largest > _FIDELITY_K
                else {}
            )
            status = client.status()
        record = _record(rows, fidelity, at_largest, status, splice_over_copy(rows, status["model"]))
    except LocomoError as error:
        _fail(str(error))
    _print(record)
    if json_out is not None:
        json_out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        console.print(f"figures written to {json_out}")


def _fail(message: str) -> None:
    print(f"demo: {message}", file=sys.stderr)
    raise typer.Exit(1)


def _questions(sample: Conversation) -> list[str]:
    """Questions whose answer is in the conversation, in the file's order."""
    found = [q.question for q in sample.questions if q.category != Category.ADVERSARIAL and q.evidence]
    return found or [q.question for q in sample.questions]


@contextmanager
def _progress(title: str) -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


# ---- time ----


def measure_times(
    client: MemoryClient, owner: str, questions: Sequence[str], *, ks: Sequence[int], runs: int
) -> list[dict[str, Any]]:
    """Time to the first token of both arms, interleaved, a new question (and so a new block of facts) every run.

    For one question the splice goes first: its KV is never found by the text arm, while text prefilled exactly would
    be found by the splice.
    """
    timed: dict[int, dict[str, list[Answer]]] = {k: {"splice": [], "text": []} for k in ks}
    # Without facts the arms are one and the same, and the second would only find the first one's prompt.
    arms = [(k, mode) for k in ks for mode in ("splice", "text") if k or mode == "splice"]
    asked = iter(range(sys.maxsize))
    with _progress("timing both arms") as update:
        for run in range(runs + _WARM_UPS):
            for k, mode in arms:
                if mode == "splice":
                    number = next(asked)
                    if number and number % len(questions) == 0:
                        client.flush_cache()  # out of new questions: forget their blocks, then warm the prefix again
                        client.ask("Hello.", max_tokens=1, owner=owner, k=0)
                    question = questions[number % len(questions)]
                answer = client.ask(question, max_tokens=1, owner=owner, k=k, mode=mode, policy=DEFAULT_POLICY)
                if run >= _WARM_UPS:
                    timed[k][mode].append(answer)
            update(run + 1, runs + _WARM_UPS)
    return [_row(k, answers) for k, answers in timed.items()]


def ask_both(client: MemoryClient, owner: str, question: str, rows: list[dict[str, Any]]) -> None:
    """Add the answers of both arms to one question to every row."""
    for row in rows:
        row["question"] = question
        row["answers"] = {
            mode: client.ask(question, max_tokens=24, owner=owner, k=row["k"], mode=mode).text
            for mode in ("splice", "text")
        }


def _row(k: int, arms: dict[str, list[Answer]]) -> dict[str, Any]:
    def spread(values: list[float]) -> dict[str, float]:
        return {"median": statistics.median(values), "min": min(values), "max": max(values)}

    row: dict[str, Any] = {"k": k, "text_over_splice": None}
    for mode, answers in arms.items():
        if not answers:
            continue
        reports = [answer.memory for answer in answers]
        row[f"ttft_{mode}_ms"] = spread([answer.ttft_ms for answer in answers])
        row[f"prefilled_{mode}"] = statistics.median(report["tokens"]["prefilled"] for report in reports)
        row[f"tiers_{mode}"] = sorted({report["tier"] for report in reports})
        row[f"ms_{mode}"] = {
            stage: statistics.median(report["ms"][stage] for report in reports)
            for stage in ("retrieve", "assemble", "splice")
        }
    row["spliced"] = statistics.median(answer.memory["tokens"]["spliced"] for answer in arms["splice"])
    if arms["text"]:
        row["text_over_splice"] = row["ttft_text_ms"]["median"] / row["ttft_splice_ms"]["median"]
    return row


def splice_over_copy(rows: Sequence[dict[str, Any]], model: dict[str, Any]) -> float | None:
    """Time per byte of the splice against a plain copy, at the shape that was served; None where none was spliced."""
    tokens = int(max(row["spliced"] for row in rows))
    bench = Path(__file__).parents[2] / "scripts" / "bench_splice"
    if tokens == 0 or not bench.exists():
        return None
    command = [sys.executable, str(bench), "--tokens", str(tokens), "--order", "runs", "--dtype", model["dtype"]]
    command += ["--layers", str(model["num_layers"]), "--kv-heads", str(model["num_kv_heads"])]
    command += ["--head-dim", str(model["head_dim"]), "--threads", str(min(os.cpu_count() or 1, 8))]
    line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    ratio: float = json.loads(line)["ratio"]
    return ratio


# ---- faithfulness ----


class _Prompts:
    """Chat prompts as token ids, split where the facts go."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def split(self, question: str) -> tuple[list[int], list[int]]:
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": _SENTINEL + question}], tokenize=False, add_generation_prompt=True
        )
        head, tail = rendered.split(_SENTINEL)
        return tuple(self._tokenizer.encode(part, add_special_tokens=False) for part in (head, tail))


def measure_fidelity(
    client: MemoryClient, owner: str, questions: Sequence[str], prompts: _Prompts, *, k: int
) -> dict[str, dict[str, float]]:
    """KL to full prefill at the answer's first token and over its first tokens, of each policy and of the floor.

    The reference is full prefill of the same ids; its own greedy continuation is forced on every variant. The floor
    is full prefill of the same facts in another order.
    """
    arms: dict[str, dict[str, Any]] = {"floor": {"mode": "text", "order": "chronological"}}
    arms |= {policy: {"mode": "splice", "policy": policy} for policy in POLICIES}
    arms["no facts"] = {"mode": "off"}
    found: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in arms}
    with _progress(f"comparing with full prefill, k={k}") as update:
        for number, question in enumerate(questions):
            head, tail = prompts.split(question)
            memory = {"owner": owner, "k": k, "query": question}
            reference = client.continue_greedily(head, tail, steps=_STEPS, top=_TOP, memory={**memory, "mode": "text"})
            client.flush_cache()  # else the spliced arms would find the reference's exact KV
            for name, arm in arms.items():
                forced = client.teacher_force(head, tail, reference.token_ids, top=_TOP, memory={**memory, **arm})
                if arm["mode"] == "splice" and (tier := forced.memory["tier"]) != "spliced":
                    raise LocomoError(f"{name} was served as {tier}: {forced.memory['reason']}")
                found[name].append(
                    (
                        kl_divergence(reference.distributions[0], forced.distributions[0]),
                        mean_kl(reference.distributions, forced.distributions),
                        top1(reference.distributions[0]) == top1(forced.distributions[0]),
                    )
                )
            update(number + 1, len(questions))
    return {
        name: {
            "kl_first": statistics.mean(v[0] for v in values),
            f"kl_{_STEPS}": statistics.mean(v[1] for v in values),
            "top1": statistics.mean(v[2] for v in values),
            "questions": len(values),
        }
        for name, values in found.items()
    }


# ---- report ----


def _record(
    rows: list[dict[str, Any]],
    fidelity: dict[str, dict[str, float]],
    at_largest: dict[str, dict[str, float]],
    status: dict[str, Any],
    copy_ratio: float | None,
) -> dict[str, Any]:
    by_k = {row["k"]: row for row in rows}
    kl = f"kl_{_STEPS}"
    fifty, zero = by_k.get(50), by_k.get(0)
    encode = {name: cost["tokens_prefilled_per_fact_token"] for name, cost in status["encoder"]["policies"].items()}
    # The default serves from three encodings of each fact: what all cost together.
    encode[DEFAULT_POLICY] = encode[BARE_HEADER] + encode["anchor:4"] + encode["anchor:32"]
    bars = {
        "ttft_text_over_splice_k50": fifty["text_over_splice"] if fifty else None,
        "ttft_splice_k50_over_k0": (
            fifty["ttft_splice_ms"]["median"] / zero["ttft_splice_ms"]["median"] if fifty and zero else None
        ),
        "splice_over_copy": copy_ratio,
        "encode_tokens_per_fact_token": encode["anchor:4"],
        "kl_over_floor_k10": fidelity[DEFAULT_POLICY][kl] / fidelity["floor"][kl] if fidelity else None,
        "kl_k50": at_largest[DEFAULT_POLICY][kl] if at_largest else None,
    }
    return {
        "bars": bars,
        "rows": rows,
        "encode_tokens_per_fact_token": encode,
        "fidelity_k10": fidelity,
        "fidelity_k_largest": at_largest,
        "self_test": status["self_test"],
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {name: version(name) for name in ("sgl-stateful", "sglang", "torch", "transformers", "numpy")},
        "commit": _commit(),
    }


def _print(record: dict[str, Any]) -> None:
    table = Table(title="time to first token, retrieval included (median of runs, min-max)")
    for column in ("k", "text, ms", "splice, ms", "text / splice", "prefilled text / splice", "spliced"):
        table.add_column(column, justify="right")
    for row in record["rows"]:
        ratio = row["text_over_splice"]
        table.add_row(
            str(row["k"]),
            _spread(row["ttft_text_ms"]) if ratio else "-",
            _spread(row["ttft_splice_ms"]),
            f"{ratio:.1f}" if ratio else "-",
            f"{row['prefilled_text']:.0f} / {row['prefilled_splice']:.0f}"
            if ratio
            else f"{row['prefilled_splice']:.0f}",
            f"{row['spliced']:.0f}",
        )
    console.print(table)
    answers = Table(title=f"answers to: {record['rows'][0]['question']}")
    for column in ("k", "text", "splice"):
        answers.add_column(column)
    for row in record["rows"]:
        answers.add_row(str(row["k"]), row["answers"]["text"].strip(), row["answers"]["splice"].strip())
    console.print(answers)
    for name, title in (("fidelity_k10", f"k={_FIDELITY_K}"), ("fidelity_k_largest", "largest k")):
        if record[name]:
            console.print(_fidelity_table(record[name], title))
    for policy, cost in record["encode_tokens_per_fact_token"].items():
        console.print(f"tokens prefilled per fact token, {policy}: {cost:.2f}")
    for bar, value in record["bars"].items():
        console.print(f"{bar}: {value}")


def _spread(times: dict[str, float]) -> str:
    return f"{times['median']:.0f} ({times['min']:.0f}-{times['max']:.0f})"


def _fidelity_table(arms: dict[str, dict[str, float]], title: str) -> Table:
    table = Table(title=f"KL to full prefill of the same ids, {title}")
    for column in ("served as", "first token", f"mean of {_STEPS}", "same first token", "questions"):
        table.add_column(column, justify="right")
    for name, arm in arms.items():
        label = "full prefill, another order (the floor)" if name == "floor" else name
        table.add_row(
            label,
            f"{arm['kl_first']:.3f}",
            f"{arm[f'kl_{_STEPS}']:.3f}",
            f"{arm['top1']:.2f}",
            str(arm["questions"]),
        )
    return table


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str | None:
    root = Path(__file__).parents[2]
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
