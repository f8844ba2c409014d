"""Print samples of the training text: python -m demo_text [COUNT [SEED]], in the folder scripts."""

from __future__ import annotations

import sys
from random import Random

from . import document


def main(count: int = 5, seed: int = 1) -> None:
    rng = Random(seed)
    for _ in range(count):
        for role, text in document(rng, held_out=False):
            print(f"{role:>9}: {text}")
        print()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
