"""Models from the Hugging Face Hub, and those that were fetched before.

hf:OWNER/REPO               a model of that repository, in the format that memory holds
hf:OWNER/REPO:Q4_K_M        in that format
hf:OWNER/REPO:name.gguf     that file, or the only one that fits a pattern
"""

from .client import download, find, pull
from .names import PREFIX, hint, is_reference
from .store import Stored, remove, stored

__all__ = ["PREFIX", "Stored", "download", "find", "hint", "is_reference", "pull", "remove", "stored"]
