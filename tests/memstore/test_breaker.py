import threading

from memstore.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_lets_everything_through_until_a_failure() -> None:
    breaker = Breaker(1.0, clock=Clock())
    assert all(breaker.may_call() for _ in range(5))
    breaker.succeeded()
    assert breaker.may_call()


def test_after_a_failure_nothing_goes_through_for_its_rest() -> None:
    clock = Clock()
    breaker = Breaker(1.0, clock=clock)
    assert breaker.may_call()
    breaker.failed()
    clock.now += 0.999
    assert not breaker.may_call()
    clock.now += 0.001
    assert breaker.may_call()


def test_one_call_probes_and_the_others_wait_for_what_it_reports() -> None:
    clock = Clock()
    breaker = Breaker(1.0, clock=clock)
    breaker.failed()
    clock.now += 1.0
    assert [breaker.may_call() for _ in range(3)] == [True, False, False]
    breaker.failed()
    assert not breaker.may_call()
    clock.now += 1.0
    assert breaker.may_call()
    breaker.succeeded()
    assert all(breaker.may_call() for _ in range(3))


def test_a_call_that_began_before_the_failure_closes_it_when_it_succeeds() -> None:
    breaker = Breaker(1.0, clock=Clock())
    assert breaker.may_call()
    assert breaker.may_call()
    breaker.failed()
    breaker.succeeded()
    assert breaker.may_call()


def test_a_probe_that_shows_nothing_leaves_it_open_and_the_next_one_probes() -> None:
    clock = Clock()
    breaker = Breaker(1.0, clock=clock)
    breaker.failed()
    breaker.released()
    assert not breaker.may_call(), "the rest is not over"
    clock.now += 1.0
    assert breaker.may_call()
    breaker.released()
    assert [breaker.may_call() for _ in range(2)] == [True, False]


def test_of_many_threads_one_probes() -> None:
    clock = Clock()
    breaker = Breaker(1.0, clock=clock)
    breaker.failed()
    clock.now += 1.0
    admitted: list[bool] = []
    barrier = threading.Barrier(16)

    def ask() -> None:
        barrier.wait()
        admitted.append(breaker.may_call())

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(admitted) == [False] * 15 + [True]
