"""`python -m powerinfer.chat` is `powerinfer chat`."""

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main(["chat", *sys.argv[1:]]))
