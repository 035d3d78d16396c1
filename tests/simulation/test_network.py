"""The simulated network: latency, losses, cuts and processes that are down, all from one seed."""

import pytest

from raykv.simulation.network import TIMEOUT_S, Network


def exchange(network: Network, count: int = 1000) -> tuple[list[float], list[float | None], list[float]]:
    """Send requests from a to b. Return the times of arrival, and the answers with their times."""
    served, answers, times = list[float](), list[float | None](), list[float]()

    def serve() -> float:
        served.append(network.now_s)
        return network.now_s

    def done(answer: float | None) -> None:
        answers.append(answer)
        times.append(network.now_s)

    for number in range(count):
        network.at(number * 0.001, lambda: network.call("a", "b", serve, done))
    network.run(1000.0)
    return served, answers, times


def test_every_call_ends_once_and_equal_seeds_give_equal_runs(seed: int):
    runs = []
    for _ in range(2):
        network = Network(seed)
        network.loss, network.delay_s = 0.1, 0.4
        runs.append(exchange(network))
    assert runs[0] == runs[1]
    served, answers, _ = runs[0]
    assert len(answers) == 1000
    assert 850 < len(served) < 950, "a tenth of the requests is lost"
    late = sum(answer is None for answer in answers)
    assert 190 + 100 < late < 600, "a fifth loses a message, and others take longer than TIMEOUT_S"
    assert exchange(Network(seed + 1)) != exchange(Network(seed))


def test_an_answer_takes_two_latencies_and_a_failure_the_timeout(seed: int):
    served, answers, times = exchange(Network(seed, latency_s=0.1))
    assert None not in answers
    assert all(0.05 <= at_s - number * 0.001 <= 0.15 for number, at_s in enumerate(sorted(served)) if number == 0)
    assert 0.1 <= min(times) <= max(times) <= 0.999 + 0.3
    network = Network(seed)
    network.loss = 1.0
    _, answers, times = exchange(network, 3)
    assert answers == [None] * 3
    assert times == pytest.approx([TIMEOUT_S, TIMEOUT_S + 0.001, TIMEOUT_S + 0.002])


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_cut_has_one_direction(seed: int, way: str):
    network = Network(seed)
    network.cut(["a"], ["b", "c"]) if way == "there" else network.cut(["b"], ["a"])
    served, answers, _ = exchange(network, 10)
    assert (len(served), answers) == (0 if way == "there" else 10, [None] * 10)
    assert network.ask("d", "a", lambda: "answer") == "answer"
    network.heal()
    assert network.ask("a", "b", lambda: "answer") == "answer"


def test_a_process_that_is_down_does_not_answer(seed: int):
    network = Network(seed)
    network.down.add("b")
    served, answers, times = exchange(network, 10)
    assert (served, answers) == ([], [None] * 10)
    assert max(times) < 0.1, "the connection is refused"
    assert network.ask("a", "b", lambda: "answer") is None
