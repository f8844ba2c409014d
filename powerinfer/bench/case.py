"""What is to be measured: prompts, decoding, or both, after so many tokens of context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt of n_prompt tokens, then n_gen decoded ones; either may be 0."""

    n_prompt: int
    n_gen: int
    depth: int
    """Tokens that the context holds before."""
    n_seq: int = 1
    """Sequences that are decoded together, a token of each in a step; above 1 there is no prompt."""

    @property
    def name(self) -> str:
        """ "pp512", "tg32", "pp512+tg32", "tg32 x 8" of 8 sequences, and "@ d4096" where the context is not
        empty."""
        parts = [f"pp{self.n_prompt}"] * bool(self.n_prompt) + [f"tg{self.n_gen}"] * bool(self.n_gen)
        many = f" x {self.n_seq}" if self.n_seq > 1 else ""
        return "+".join(parts) + many + (f" @ d{self.depth}" if self.depth else "")

    @property
    def n_tokens(self) -> int:
        """That are timed."""
        return self.n_prompt + self.n_gen * self.n_seq

    @property
    def n_positions(self) -> int:
        """That each sequence needs."""
        return self.depth + self.n_prompt + self.n_gen


def numbers(option: str, texts: Sequence[str], *, least: int = 0) -> list[int]:
    """The whole numbers of comma-separated lists, each once, in their order. Raises ArgumentError."""
    out: list[int] = []
    for text in texts:
        for word in text.split(","):
            # int() also takes "1_0", and digits of every script.
            is_number = word.strip().lstrip("+-").isdecimal() and word.strip().isascii()
            value = int(word) if is_number else 0
            if not is_number or value < least:
                raise ArgumentError(f"{option} {text}: {word!r} is not a whole number of at least {least}")
            out.append(value)
    return list(dict.fromkeys(out))


def pairs(option: str, texts: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs "PP,TG". Raises ArgumentError."""
    out = []
    for text in texts:
        if text.count(",") != 1:
            raise ArgumentError(f"{option} {text}: a pair of whole numbers is needed, like 512,128")
        n_prompt, n_gen = (numbers(option, [word], least=1)[0] for word in text.split(","))
        out.append((n_prompt, n_gen))
    return list(dict.fromkeys(out))


def cases(
    prompts: Sequence[str],
    gens: Sequence[str],
    both: Sequence[str],
    depths: Sequence[str],
    sequences: Sequence[str] = ("1",),
) -> list[Case]:
    """All of them at every depth, decoding for every number of sequences, from the texts of -p, -n, -pg, -d
    and -np. Raises ArgumentError."""
    many = numbers("-np", sequences, least=1)
    sizes = [(n, 0) for n in numbers("-p", prompts)] + [(0, n) for n in numbers("-n", gens)]
    sizes = [size for size in sizes if sum(size)] + pairs("-pg", both)
    if not sizes:
        raise ArgumentError("nothing to measure: no -p, -n or -pg above 0")
    return [
        Case(n_prompt=n_prompt, n_gen=n_gen, depth=depth, n_seq=n_seq)
        for depth in numbers("-d", depths)
        for n_prompt, n_gen in sizes
        for n_seq in ([1] if n_prompt else many)
    ]
