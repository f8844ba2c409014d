"""Where prompts are cut, and what one takes over from another, beside the rule of the engine's interface.

`kernels` is that rule, written down once more. What the engine answers is compared with a search: of all
places to cut, those that leave each token the kernels that it has when the prompt is fed at once.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from powerinfer._engine import _native
from powerinfer._engine._native import chunk_end, ffi, lib

ALL = 10**6


def reusable_prefix(n_same: int, n_held_prompt: int, n_prompt: int) -> int:
    """Of a model without recurrent layers."""
    return int(lib.pi_prefix_reusable(ffi.NULL, 0, n_same, n_held_prompt, n_prompt))


RNG = random.Random(1)


@cache
def kernels(first: int, end: int, generated_from: int) -> tuple[bool, ...]:
    """Of the tokens of a feed, whether each is computed by row kernels."""
    prompt = range(first, min(end, generated_from))
    if len(prompt) < 16:
        return (True,) * (end - first)
    return tuple(i not in prompt for i in range(first, end))


@cache
def is_right(first: int, cut: int, end: int, generated_from: int) -> bool:
    """Whether tokens first..end-1 have in two feeds the kernels that they have in one."""
    parts = kernels(first, cut, generated_from) + kernels(cut, end, generated_from)
    return parts == kernels(first, end, generated_from)


def fed(first: int, n_prompt: int, sizes: list[int]) -> tuple[bool, ...]:
    """The kernels of a prompt's tokens from the first on, in parts of about these sizes."""
    result: tuple[bool, ...] = ()
    while first < n_prompt:
        end = chunk_end(first, n_prompt, RNG.choice(sizes), generated_from=n_prompt - 1)
        assert end > first
        result += kernels(first, end, n_prompt - 1)
        first = end
    return result


@pytest.mark.parametrize("first", [0, 7, 8, 9, 16])
def test_a_part_ends_at_the_best_place(first: int) -> None:
    """The last right one within the wanted size, else the first one behind it."""
    for end in range(first + 1, first + 60):
        for generated_from in {end, end - 1}:
            right = [e for e in range(first + 1, end + 1) if is_right(first, e, end, generated_from)]
            for size in range(1, 65):
                within = [e for e in right if e <= first + size]
                want = within[-1] if within else right[0]
                got = chunk_end(first, end, size, generated_from=generated_from)
                assert got == want, (end, generated_from, size)
                assert got - first <= size + 30


@pytest.mark.parametrize("n_prompt", [*range(1, 70), 128, 129, 200])
def test_prompts_are_computed_as_if_whole(n_prompt: int) -> None:
    whole = kernels(0, n_prompt, n_prompt - 1)
    for sizes in ([1], [8], [17], [64], [1, 5, 16, 30, 100]):
        assert fed(0, n_prompt, sizes) == whole
    for n_held in range(1, 90):
        held = kernels(0, n_held, n_held - 1)
        for same in range(min(n_held, n_prompt) + 1):
            n = reusable_prefix(same, n_held, n_prompt)
            assert 0 <= n <= max(min(same, n_prompt - 1), 0)
            assert held[:n] + fed(n, n_prompt, [3, 20, 512]) == whole


@pytest.mark.parametrize("n_prompt", [1, 2, 16, 17, 18, 25, 33, 40, 41, 70])
def test_as_much_as_possible_is_reused(n_prompt: int) -> None:
    whole = kernels(0, n_prompt, n_prompt - 1)
    for n_held in range(1, 90):
        held = kernels(0, n_held, n_held - 1)
        for same in range(min(n_held, n_prompt) + 1):
            most = max(min(same, n_held - 1, n_prompt - 1), 0)
            right = [n for n in range(most + 1) if held[:n] + kernels(n, n_prompt, n_prompt - 1) == whole]
            assert reusable_prefix(same, n_held, n_prompt) == right[-1], (same, n_held)


def test_what_goes_on_behind_a_held_prompt_is_taken_as_it_is() -> None:
    for n_held in (0, 1, 16, 40):
        for same in range(n_held + 1, n_held + 40):
            assert reusable_prefix(same, n_held, same + 1) == same


@pytest.mark.parametrize("n", [1, 7, 16, 24, 33, 90])
def test_scored_texts_are_computed_as_if_whole(n: int) -> None:
    for scored in (range(n), range(1), range(n - 1, n)):
        for _ in range(50):
            first = 0
            got: tuple[bool, ...] = ()
            while first < n:
                most = RNG.randint(0, 64)
                end = chunk_end(first, n, RNG.randint(0, 90), scored=scored, max_scored=most)
                assert first <= end <= n
                assert len(range(max(first, scored.start), min(end, scored.stop))) <= most + 30
                got += kernels(first, end, ALL)
                first = end
            assert got == kernels(0, n, ALL)
    assert chunk_end(0, 500, 256, scored=range(1), max_scored=64) == 256  # only what is scored counts


def test_a_part_has_no_more_generated_tokens_than_row_kernels_take() -> None:
    for first in range(0, 60, 3):
        for generated_from in range(0, 60, 5):
            end = chunk_end(first, 200, 500, generated_from=generated_from)
            assert end == max(first, generated_from) + 16


def test_broken_ranges_are_refused() -> None:
    lib, ffi = _native.lib, _native.ffi
    assert lib.pi_chunk_end(ffi.NULL) == -1
    for first, end in ((-1, 5), (6, 5)):
        assert chunk_end(first, end, 4) == -1
    top = 2**31 - 1  # no sum may wrap
    assert chunk_end(0, top, top) == top
    assert chunk_end(top - 40, top, 17) == top - 40 + 17
    assert chunk_end(5, 9, 2, generated_from=-(2**31), scored=range(-(2**31), top), max_scored=top) == 7
    assert reusable_prefix(top, top, top) == top - 1
    assert reusable_prefix(-(2**31), top, -(2**31)) == 0


def test_a_part_ends_at_a_branch() -> None:
    """Wherever another prompt parts from this one, no token gets other kernels; the part ends there, or a few
    tokens before, where it has and leaves enough."""
    for end in (40, 41, 48, 100):
        for first in (0, 8, 24):
            for branch in range(end + 9):
                got = chunk_end(first, end, 500, generated_from=end - 1, branch=branch)
                assert is_right(first, got, end, end - 1), (first, end, branch)
                last = end - 1
                if first + 16 <= branch <= last - 16:
                    assert got == branch
                if branch >= last and last - first >= 16:
                    assert got == last
                assert got == end or got <= branch
