"""A prompt of the small models, and the likeliest tokens that follow one."""

from __future__ import annotations

from itertools import islice

from powerinfer import Llama

PROMPT = [1, 17, 260, 43, 291, 300, 8]


def greedy(llm: Llama, prompt: list[int], n: int) -> list[int]:
    return list(islice(llm.generate(prompt, temp=0.0), n))
