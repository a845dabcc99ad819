"""Time the memory store on SQLite and on Redis beside mem0ai on FAISS, in one run, on the same facts and vectors.

Hits are compared with exact ones before anything is timed, and the arms are timed in turns. mem0ai runs in a process of
its own and is timed there; it is installed, without its dependencies, beside the project and not into it.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import torch

from memstore import SentenceTransformerEmbedder
from memstore_bench.corpus import Corpus, KnownTextEmbedder
from memstore_bench.environment import description, mem0_directory
from memstore_bench.measure import bars_of
from memstore_bench.suite import Repeats, Suite
from memstore_bench.table import table


def main() -> None:
    """Parse, measure, print."""
    args = _arguments()
    # Ended in the ordinary way, so that the stores and the servers go too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = description() | {"sizes": args.sizes, "vectors": "the first 4,000 of the model, the rest of those with noise"}
    torch.set_num_threads(int(str(run["threads"])))
    _say(json.dumps(run))
    backends = [name for name in ("sqlite", "redis") if name in args.arms]
    if "redis" in backends and shutil.which("redis-server") is None:
        _say("no redis-server on the PATH: the rows of redis are left out (apt-get install redis-server)")
        backends.remove("redis")
    packages = mem0_directory(args.cache) if "mem0" in args.arms else None
    repeats = Repeats(usual=20, slow=10, owners=20, probes=20) if args.quick else Repeats()
    model = SentenceTransformerEmbedder(threads=int(str(run["threads"])))
    corpus = Corpus(max(max(args.sizes), repeats.owners * 100), embedder=model, cache=args.cache)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-memstore-") as directory:
        corpus.save(Path(directory))
        suite = Suite(
            Path(directory),
            corpus,
            KnownTextEmbedder(corpus, model),
            backends=backends,
            mem0_packages=packages,
            repeats=repeats,
            only=args.only,
            say=_say,
        )
        suite.run(args.sizes)
    bars = bars_of(suite.rows, recall=suite.recall)
    print(table(suite.rows, markdown=args.markdown))
    print(json.dumps({name: value if value is None else round(value, 4) for name, value in bars.items()}))
    tails = [row.ratio_p95 for row in suite.rows if row.ratio_p95 is not None]
    if tails:
        print(f"worst ratio of the 95th percentiles: {min(tails):.2f}")
    if args.json is not None:
        report = {"bars": bars, "rows": [row.as_json() for row in suite.rows], "run": run}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="bench_memstore", description=lines[0])
    parser.add_argument("--sizes", type=_numbers, default=None, help="facts, as 1000,10000,100000 (the default)")
    parser.add_argument("--only", type=_names, default=(), help="rows whose names begin so, as search,add")
    parser.add_argument("--arms", type=_names, default=("sqlite", "redis", "mem0"), help="as sqlite,mem0")
    parser.add_argument("--quick", action="store_true", help="sizes 100 and 1,000 and few repeats: does it run?")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--markdown", action="store_true", help="print the table for the README")
    parser.add_argument("--dir", type=Path, help="where the stores are made; the system's temporary directory")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path.home() / ".cache" / "sgl-stateful",
        help="where mem0 and the embedded sentences are kept between runs",
    )
    args = parser.parse_args()
    args.sizes = args.sizes or ([100, 1000] if args.quick else [1000, 10_000, 100_000])
    return args


def _numbers(text: str) -> list[int]:
    return sorted(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
