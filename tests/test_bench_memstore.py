from scripts.memstore_bench.measure import Measured, Row, bars_of, interleaved, p95, rows_of


def test_every_arm_runs_its_items_once_and_in_turns():
    ran: list[tuple[str, int, int]] = []

    def arm(name):
        def run(first, count):
            ran.append((name, first, count))
            return [float(i) for i in range(first, first + count)]

        return run

    samples, first_calls = interleaved({"a": arm("a"), "b": arm("b")}, {"a": 25, "b": 4}, warm_up=2, first=100)
    assert samples == {"a": [float(i) for i in range(102, 127)], "b": [102.0, 103.0, 104.0, 105.0]}
    assert first_calls == {"a": 100.0, "b": 100.0}
    assert ran[:2] == [("a", 100, 2), ("b", 100, 2)]
    # Neither arm runs as a whole before the other.
    assert [name for name, _, _ in ran[2:]].index("b") < 6
    assert ran[-1][0] == "a" or ran[-2][0] == "a"


def test_p95_is_the_sample_that_five_percent_exceed():
    assert p95([float(i) for i in range(100, 0, -1)]) == 95.0
    assert p95([float(i) for i in range(1, 21)]) == 19.0
    assert p95([7.0]) == 7.0


def test_ratio_says_how_many_times_longer_mem0_takes():
    samples = {"sqlite": [1.0, 2.0, 3.0], "mem0": [4.0, 8.0, 9.0], "mem0-faiss": [1.0]}
    rows = rows_of("add", 10, Measured(samples, {"sqlite": 30.0, "mem0": 9.0, "mem0-faiss": 1.0}))
    assert [row.note for row in rows] == ["the very first took 30 ms", "", ""]
    assert [(row.arm, row.median, row.ratio) for row in rows] == [
        ("sqlite", 2.0, 4.0),
        ("mem0", 8.0, None),
        ("mem0-faiss", 1.0, None),
    ]
    assert rows[0].ratio_p95 == 3.0


def test_bars_take_the_worse_backend_and_the_worst_ratio():
    rows = [
        Row("search_vector", 1000, "sqlite", "ms", 9.0, 99.0, 200, ratio=3.0),
        Row("search_vector", 100_000, "sqlite", "ms", 5.0, 8.0, 200, ratio=2.0),
        Row("search_vector", 100_000, "redis", "ms", 6.0, 7.0, 200, ratio=1.5),
        Row("search_vector", 100_000, "mem0", "ms", 50.0, 60.0, 200),
        Row("open_owner", 100_000, "sqlite", "ms", 1.0, 3.0, 997, ratio=4.0),
        Row("open_owner", 100_000, "redis", "ms", 2.0, 2.5, 997, ratio=2.5),
    ]
    assert bars_of(rows, recall=0.9995) == {
        "search_p95_ms_100k": 8.0,
        "recall_at_10_100k": 0.9995,
        "open_owner_ms": 2.0,
        "worst_ratio_vs_mem0": 1.5,
    }


def test_what_was_not_measured_is_none():
    rows = [Row("search_vector", 1000, "sqlite", "ms", 9.0, 99.0, 200)]
    assert set(bars_of(rows, recall=1.0).values()) == {None}
