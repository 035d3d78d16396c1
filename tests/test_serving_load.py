"""The serving benchmark's arithmetic: what an engine that holds everything would reuse."""

from benchmarks.serving_load import Asked, reusable


def asked(began_s: float, prompt: list[int], tokens: list[int], ttft_s: float = 1.0) -> Asked:
    return Asked(began_s, ttft_s, cached=0, prompt=prompt, tokens=tokens, text="", request_id="")


def test_the_ideal_is_the_longest_earlier_prefix_in_whole_blocks():
    first = asked(0.0, [*range(10)], [100, 101, 102])
    second = asked(5.0, [*range(10), 100, 101, 7, 8, 9, 10], [200])
    third = asked(9.0, [*range(6), 50, 51], [200])
    assert reusable([first], 4) == 0
    assert reusable([first, second], 4) == 12, "the first prompt and two tokens of its answer"
    assert reusable([first, second, third], 4) == 12 + 4
    assert reusable([third, second, first], 4) == 12 + 4, "the order of the list is no matter"


def test_a_prefix_that_is_being_computed_counts_and_a_later_one_does_not():
    first = asked(0.0, [*range(8)], [100], ttft_s=3.0)
    assert reusable([first, asked(2.0, [*range(8), 1], [5])], 4) == 8
    assert reusable([asked(4.0, [*range(8)], [100]), asked(2.0, [*range(8), 1], [5])], 4) == 4


def test_the_last_token_of_a_prompt_and_of_an_answer_are_always_computed():
    first = asked(0.0, [*range(8)], [100])
    assert reusable([first, asked(4.0, [*range(8)], [100])], 4) == 4
    assert reusable([first, asked(4.0, [*range(8), 100, 1], [5])], 9) == 0
