"""The commands that make each part of a report, for the line that stands where a part is missing."""

from .contents import Missing

ANSWERS = Missing("Official F1 and Mem0's metrics", "python -m locomo run, then python -m locomo score")
JUDGE = Missing("The judge's verdicts", "python -m locomo score with a judge endpoint")
FIDELITY = Missing("Distance from full prefill", "python -m locomo run with fidelity, then python -m locomo score")
INFORMATION = Missing(
    "Share of the answer's information kept and forced choice",
    "python -m locomo run with fidelity and the arm none, then python -m locomo score",
)
RECALL = Missing(
    "Retrieval recall", "python -m locomo retrieval, or python -m locomo score on a run with retrieved ids"
)
TTFT = Missing("Time to first token", "scripts/bench_ttft --json OUT/bench_ttft.json")
THROUGHPUT = Missing("Throughput", "scripts/bench_throughput --json OUT/bench_throughput.json")
ENCODING = Missing("Cost of encoding", "scripts/bench_encode --json OUT/bench_encode.json")
