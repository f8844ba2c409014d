"""Where prompts are cut, and what one takes over from another, beside the rule of the engine's interface."""

from __future__ import annotations

import random

import pytest

from powerinfer._engine.context import n_reusable, part_end, visit_end

ALL = 10**6
RNG = random.Random(1)


def ways(first: int, end: int, next_from: int) -> list[bool]:
    """Of the tokens of a feed, whether each is computed alone; of those from next_from on NEXT is wanted."""
    others = range(first, min(end, next_from))
    together = others.stop // 8 * 8
    if together - first < 16 or not others:
        return [True] * (end - first)
    return [i >= together for i in range(first, end)]


def fed(first: int, n_prompt: int, sizes: list[int]) -> list[bool]:
    """The same of a prompt's tokens from the first on, in parts of about these sizes."""
    result = []
    while first < n_prompt:
        end = part_end(first, n_prompt, RNG.choice(sizes), n_prompt - 1)
        assert end > first
        result += ways(first, end, n_prompt - 1)
        first = end
    return result


@pytest.mark.parametrize("n_prompt", [*range(1, 70), 128, 129, 200])
def test_prompts_are_computed_as_if_whole(n_prompt: int) -> None:
    whole = ways(0, n_prompt, n_prompt - 1)
    for sizes in ([1], [8], [17], [64], [1, 5, 16, 30, 100]):
        assert fed(0, n_prompt, sizes) == whole
    for n_held in range(1, 90):
        held = ways(0, n_held, n_held - 1)
        for same in range(min(n_held, n_prompt) + 1):
            n = n_reusable(same, n_held, n_prompt)
            assert 0 <= n <= max(min(same, n_prompt - 1), 0) and n > same - 40
            assert held[:n] + fed(n, n_prompt, [3, 20, 512]) == whole


@pytest.mark.parametrize("n", [1, 7, 16, 24, 33, 90])
def test_visited_texts_are_computed_as_if_whole(n: int) -> None:
    for visited in (range(n), range(1), range(n - 1, n)):
        for _ in range(50):
            first, got = 0, list[bool]()
            while first < n:
                end = visit_end(first, visited, n, RNG.randint(0, 90), RNG.randint(0, 64))
                assert first <= end <= n
                got += ways(first, end, ALL)
                first = end
            assert got == ways(0, n, ALL)
    assert visit_end(0, range(1), 500, 256, 64) == 256  # what is not visited is not cut for it
