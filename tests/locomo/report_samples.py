"""Invented scores and benchmark files, and a reader of the pages made from them."""

import random
from html.parser import HTMLParser
from typing import Any

ARMS = (
    "full",
    "none@10",
    "text/head@10",
    "text/tail@10",
    "splice/window:0/tail@10",
    "splice/window:2/tail@10",
    "splice/window:20/tail@10",
    "splice/ladder:0+4/tail@10",
    "splice/ladder:0+4/tail@50",
    "splice/ladder:0+4/head@10",
    "oracle/splice/ladder:0+4/tail@10",
    "floor/shuffled@10",
    "floor/swapped@10",
    "floor/fp32@10",
)
POLICIES = ("window:0", "anchor:4", "ladder:0+4")
BEST = "splice/window:2/tail@10"
PAIRED = ("kl_answer", "nll_per_token", "forced_choice", "official_f1")


def sample_score() -> dict[str, Any]:
    """A score whose every number is another one."""
    draw = random.Random(20260301)

    def share() -> float:
        return draw.uniform(0.05, 0.95)

    def estimate(mean: float) -> dict[str, Any]:
        interval = [mean * 0.8, mean * 1.3]
        return {
            "mean": mean,
            "interval": interval,
            "over": "conversations",
            "groups": 10,
            "n": draw.randrange(100, 150),
        }

    def judge() -> dict[str, Any]:
        right = share()
        return {
            "accuracy": right,
            "interval": [right - 0.04, right + 0.045],
            "over": "conversations",
            "groups": 10,
            "n": 150 + draw.randrange(50),
            "abstained": draw.randrange(90),
            "unjudged": draw.randrange(90),
            "tied": draw.randrange(90),
            "runs": [share(), share(), None],
        }

    def arm(name: str) -> dict[str, Any]:
        return {
            "n": 150 + draw.randrange(50),
            "official_f1": {key: share() for key in ("all", "1", "2", "3", "4", "5")},
            "mem0_f1": share(),
            "answered": {key: draw.randrange(150) for key in ("all", "1", "2", "3", "4", "5")},
            "mem0_bleu1": share(),
            "mem0_answered": draw.randrange(150),
            "judge": judge() if name.startswith(("text", "none")) else None,
            **{
                key: estimate(share())
                for key in ("kl_first", "kl_answer", "top1_first", "nll_per_token_difference", "unlisted_probability")
            },
            **{key: estimate(share()) for key in ("share_of_information_kept", "forced_choice", "information_in_text")},
            "forced_choice_chance": share() / 9,
            "kl_over_shuffle_floor": estimate(share() * 3),
            "less_text": {key: estimate(share()) for key in PAIRED} if name.startswith("splice") else None,
            "less_shuffled": {key: estimate(share()) for key in PAIRED} if name.startswith("splice") else None,
            "fidelity_measured": 100 + draw.randrange(50),
            "tiers": {"spliced": 7, "text": 3},
            "errors": draw.randrange(9),
        }

    return {
        "k": 10,
        "bars": {
            "kl_over_shuffle_floor": 0.913,
            "share_of_information_kept": 0.961,
            "recall_all_at_10": 0.5364,
            "kl_over_shuffle_floor_interval": [0.61, 1.38],
        },
        "best_arm": BEST,
        "best_of": {"arms": [name for name in ARMS if name.startswith("splice") and name.endswith("@10")], "n": 97},
        "arms": {name: arm(name) for name in ARMS},
        "recall": {
            unit: {kind: {str(k): share() for k in (5, 10, 20, 50)} for kind in ("all", "any", "share")} | {"n": 173}
            for unit in ("turns", "observations")
        },
        "config": {"k": [10, 50], "seed": 0, "note": "<script>alert('x')</script> & more"},
        "questions": {"scored": 200, "wanted": 200, "conversations": 10, "data_sha256": "5" * 64},
        "header": {
            "model_name": "SmolLM2-135M-Instruct",
            "embedder": "all-MiniLM-L6-v2",
            "commit": "0123456789ab-dirty",
            "versions": {"torch": "2.9.1"},
            "machine": {"cpu": "Invented CPU", "cores": 2, "system": "Linux-6.1-x86_64"},
            "threads": "2",
            "data_sha256": "5" * 64,
            "prompt_sha256": "6" * 64,
            "model_fingerprint": "38ba9ae5ee3e8ba0bedef43896cefb3c",
            "system": {
                "model": {
                    "fingerprint": "38ba9ae5ee3e8ba0bedef43896cefb3c",
                    "model": "198971f90eddf15523a76ce443123b9a",
                    "dtype": "bfloat16",
                    "num_layers": 30,
                    "num_kv_heads": 3,
                    "head_dim": 64,
                    "page_size": 1,
                    "bytes_per_token": 23040,
                    "device": "cpu",
                },
                "policies": ["ladder:0+4", "anchor:4", "window:0"],
                "self_test": {"passed": True, "k_error": 0.003, "v_error": 0.0, "tolerance": 0.008, "kl": 0.038},
            },
        },
    }


def sample_benches() -> dict[str, Any]:
    """The three benchmarks' files."""
    draw = random.Random(7)

    def ttft() -> dict[str, float]:
        return {"p50": draw.uniform(10, 90), "p95": draw.uniform(90, 200), "mean": draw.uniform(10, 90), "repeats": 30}

    meta = {
        "model": "SmolLM2-135M-Instruct",
        "commit": "0123456",
        "cpu": "Invented CPU",
        "data_sha256": "5" * 64,
        "units": "turns",
        "finished": True,
    }

    arms = ("none", "text/tail", "splice/ladder:0+4/tail")
    parts = ("retrieve", "assemble", "splice", "prefill", "other")
    return {
        "bench_ttft": {
            "bars": {
                "ttft_text_over_splice_k50": 31.62,
                "ttft_text_over_splice_k50_interval": [28.4, 33.9],
                "ttft_splice_k50_over_k0": 2.043,
            },
            "meta": meta,
            "rows": [
                {
                    "arm": arm,
                    "k": k,
                    "case": case,
                    "ttft_ms": ttft(),
                    "parts_ms": {part: draw.uniform(1, 20) for part in parts},
                }
                for case in ("repeated", "new")
                for k in (50, 0, 10)
                for arm in arms
            ],
        },
        "bench_throughput": {
            "bars": {"qps_ratio_16_users_k50": 4.126},
            "meta": meta,
            "rows": [
                {
                    "arm": arm,
                    "load": load,
                    "users": level if load == "closed" else None,
                    "rate_per_s": level / 4 if load == "open" else None,
                    "qps": draw.uniform(1, 9),
                    "ttft_ms": ttft(),
                    "arena_mib": draw.uniform(50, 90),
                }
                for load in ("closed", "open")
                for arm in arms
                for level in (1, 4, 16)
            ],
        },
        "bench_encode": {
            "bars": {"encode_tokens_per_fact_token": 2.018},
            "meta": meta,
            "rows": [
                {
                    "policy": policy,
                    "facts_per_s": draw.uniform(5, 30),
                    "tokens_prefilled_per_fact_token": draw.uniform(1, 6),
                    "bytes_per_fact": draw.randrange(900_000, 2_000_000),
                }
                for policy in POLICIES
            ],
        },
    }


def with_interval(estimate: dict[str, Any], digits: int, *, n: int | None = None) -> str:
    """As a cell has it; `n` is that of the row."""
    low, high = estimate["interval"]
    own = f", n = {estimate['n']}" if n not in (None, estimate["n"]) else ""
    return f"{estimate['mean']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]{own}"


class ReadPage(HTMLParser):
    """A page taken apart.

    `tables` by caption, each a list of rows that map a column's heading to its cell's text; an interval follows its
    mean after a space. `values` are the numbers that cells claim to show, `tags` all tags with their attributes.
    """

    VOID = frozenset({"meta", "path", "use", "br", "link", "img", "rect", "line", "circle"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[dict[str, str]]] = {}
        self.values: list[float] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.unbalanced: list[str] = []
        self._open: list[str] = []
        self._row: list[str] | None = None
        self._columns: list[str] | None = None
        self._caption: str | None = None
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if (value := found.get("data-value")) is not None:
            self.values.append(float(value))
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "table":
            self._columns, self._caption = None, ""
        elif tag == "tr":
            self._row = []
        elif tag in ("td", "th") and self._row is not None:
            self._row.append("")
        elif tag == "small" and self._row:
            self._row[-1] += " "

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID:
            return
        opened = self._open.pop()
        if opened != tag:
            self.unbalanced.append(f"<{opened}> ended by </{tag}>")
        if tag == "tr" and self._row is not None:
            if self._columns is None:
                self._columns = self._row
                assert self._caption is not None
                self.tables[self._caption] = []
            else:
                assert len(self._row) == len(self._columns)
                assert self._caption is not None
                self.tables[self._caption].append(dict(zip(self._columns, self._row, strict=True)))
            self._row = None

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if "caption" in self._open:
            self._caption = (self._caption or "") + data
        elif self._row and ("td" in self._open or "th" in self._open):
            self._row[-1] += data

    def row(self, caption: str, **where: str) -> dict[str, str]:
        """The one row of a table whose columns hold these texts."""
        [found] = [row for row in self.tables[caption] if all(row[key] == value for key, value in where.items())]
        return found
