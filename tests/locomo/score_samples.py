"""A run of six invented questions over five arms, small enough to work its figures out by hand."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from locomo.dataset import file_sha256
from locomo.runs.config import RunConfig

SYNTHETIC = Path(__file__).parent / "data/synthetic.json"
NONE, TEXT, FLOOR = "none", "text/tail@10", "floor/shuffled@10"
WINDOW, LADDER = "splice/window:0/tail@10", "splice/ladder:0+4/tail@10"
ARMS = (NONE, TEXT, WINDOW, LADDER, FLOOR)
CONFIG = RunConfig(arms=ARMS, questions=6, ids=(1, 2, 3, 4, 5), max_tokens=16)

# Gold first; of the second list another choice is as likely as the gold, which loses.
WON, TIED = [0.5, *[1.0] * 9], [1.0, 1.0, *[2.0] * 8]

ANSWERED = ["the harbour school", "swimming and pottery", "18 July 2021", "Likely yes", "Not mentioned.", "Nils"]
QUESTIONS = [("conv-901", 5, 4), ("conv-901", 0, 1), ("conv-902", 2, 2), ("conv-903", 4, 3), ("conv-903", 8, 5)]
QUESTIONS += [("conv-902", 6, 4)]
RETRIEVED = [
    ["O1", "O2", "O3", "O4", "O5", "O0", "O6", "O7", "O8", "O9"],  # the evidence, D1:1, is O0
    ["O0", "O1", "O2", "O3", "O4", "O5", "O7", "O8", "O9", "O10"],  # D1:1 is O0, D2:6 would be O6
    ["O4", "O0", "O1", "O2", "O3", "O5", "O6", "O7", "O8", "O9"],  # D2:1 is O4
    ["O0", "O1", "O8", "O2", "O3", "O4", "O5", "O6", "O7", "O9"],  # D2:6 is in O8
    ["O0", "O1", "O2", "O3", "O4", "O5", "O6", "O7", "O8", "O9"],
    ["O0", "O10", "O2", "O3", "O4", "O5", "O6", "O7", "O8", "O9"],  # D1:7 would be O1
]
TOKENS = [5, 10, 4, 2]
NLL = {
    NONE: [4.0, 3.0, 5.0, 2.0],
    TEXT: [1.0, 2.0, 1.0, 1.0],
    WINDOW: [1.5, 2.5, 2.0, 1.5],
    LADDER: [1.2, 2.1, 1.5, 1.0],
    FLOOR: [1.1, 2.0, 1.0, 1.5],
}
KL_ANSWER = {
    NONE: [3.0, 3.0, 3.0, 3.0],
    TEXT: [0.0, 0.0, 0.0, 0.0],
    WINDOW: [0.3, 0.5, 0.1, 0.9],
    LADDER: [0.2, 0.2, 0.2, 0.2],
    FLOOR: [0.2, 0.1, 0.3, 5.0],
}
WINDOW_TIERS = ["spliced", "spliced", "spliced", "text", "spliced", "exact"]


def fidelity(arm: str, number: int) -> dict[str, Any] | None:
    """None for the adversarial question, and for the last one, whose reference failed."""
    if number > 3:
        return None
    return {
        "kl_first": [0.4, 0.2, 0.0, 9.0][number],
        "top1_first": number != 1,
        "kl_answer": KL_ANSWER[arm][number],
        "unlisted": [0.01, 0.03, 0.05, 0.5][number],
        "nll": NLL[arm][number],
        "answer_tokens": TOKENS[number],
        "choices_nll": TIED if number == 1 else WON,
    }


def entry(arm: str, number: int) -> dict[str, Any]:
    series, _, k = arm.partition("@")
    failed = arm == TEXT and number == 5
    found = {
        "arm": series,
        "k": int(k) if k else None,
        "prediction": None if failed else ANSWERED[number],
        "fidelity": fidelity(arm, number),
        "error": "the prompt is too long" if failed else None,
    }
    if failed:
        return found
    tier = {WINDOW: WINDOW_TIERS[number], LADDER: "spliced", NONE: "none"}.get(arm, "text")
    served = {
        "used": [],
        "tier": tier,
        "reason": None,
        "tokens": {"prompt": 9, "prefilled": 9, "spliced": 0},
        "ttft_ms": 10.0 * (number + 1),
        "ms": {},
    }
    return found | served


def sample_rows() -> list[dict[str, Any]]:
    return [
        {
            "sample_id": sample_id,
            "index": index,
            "category": category,
            "stratum": category,
            "retrieved": list(RETRIEVED[number]),
            "arms": {arm: entry(arm, number) for arm in ARMS},
            "seconds": 1.0,
        }
        for number, (sample_id, index, category) in enumerate(QUESTIONS)
    ]


def write_run(
    folder: Path, rows: Sequence[Mapping[str, Any]], *, config: RunConfig = CONFIG, data: Path = SYNTHETIC
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    header = {
        "model_name": "SmolLM2-135M-Instruct",
        "embedder": "all-MiniLM-L6-v2",
        "commit": "0123456789ab",
        "data_sha256": file_sha256(data),
        "machine": {"cpu": "Invented CPU", "cores": 2},
    }
    (folder / "config.json").write_text(json.dumps({"config": config.as_json(), "header": header}))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
