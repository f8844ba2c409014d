"""The text on which the demo model is trained: a generator of conversations and short stories.

Everything is drawn from grammars and word lists in this folder; `document` gives one text from a random generator.
`python scripts/demo_text` prints samples.
"""

from .dialogue import document
from .exchange import Message

__all__ = ["Message", "document"]
