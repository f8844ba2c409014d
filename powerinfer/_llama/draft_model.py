"""Opening what drafts: `Llama(draft_model="mtp")` the head of the model's own file, a path a small model.

Of the memory of the last device that the model may use a quarter at most is the draft's; where that does not
hold what drafting needs there, the CPU drafts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .._engine.devices import Devices
from .._engine.drafting import Drafter
from .._engine.file import ModelFile, find_model
from .._engine.session import Model, Session, pool_size
from .._engine.types import N_BATCH
from ..errors import ArgumentError, UnsupportedError
from .loader import Loader

MTP = "mtp"
"""The name of the head, where a path may stand."""
N_DRAFT = 3
_SHARE = 4


class DraftModel:
    """A model that drafts for another one, until its session is opened."""

    def __init__(self, given: str | os.PathLike[str], file: ModelFile, model: Model, **options: Any) -> None:
        """
        given: MTP, or a model as Llama takes it. file, model: those that it drafts for. options: of Model.

        Raises UnsupportedError (the file has no such head), ArgumentError (a model of another vocabulary),
        FileError, FormatError.
        """
        self.is_head = given == MTP
        if self.is_head:
            self.model = Model(file, next_head=True, **options)
        else:
            own = ModelFile(find_model(given, vram_budget=0, verbose=False))
            _check_vocabulary(file, own)
            self.model = Model(own, use_mlock=options.get("use_mlock", False))
        self._devices: Devices | None = None
        self._model = model

    def reserve(self, devices: Devices, **options: Any) -> Devices:
        """What of the devices is left for the model. options: of Loader, as the model's own.

        Where the draft would be faster on the CPU, or does not fit, that is all of them."""
        share = devices.budgets[-1] // _SHARE
        own = replace(devices, indices=devices.indices[-1:], budgets=(share,))
        n_ctx = options["n_ctx"]
        if n_ctx == "auto" or not n_ctx:
            options["n_ctx"] = min(self._model.info.n_ctx_train, 4096)
        try:
            taken = self._loader(own, **options).needed_bytes()
        except (ArgumentError, UnsupportedError):  # its least is more, or devices do not know it
            return devices
        if not taken:
            return devices
        self._devices = replace(own, budgets=(taken,))
        return replace(devices, budgets=(*devices.budgets[:-1], devices.budgets[-1] - taken))

    def open(self, session: Session, n_draft: int, say: Callable[[str], None], **options: Any) -> Drafter:
        """session: what it drafts for. options: of Loader, as the model's own."""
        sizes = {"n_ctx": session.info.n_ctx, "n_pool": session.info.n_pool, "beside": session}
        try:
            own = self._loader(self._devices, **options | sizes).open()
        except ArgumentError as error:
            if self._devices is None:
                raise
            say(f"the CPU drafts: {error}")
            own = self._loader(None, **options | sizes).open()
        return Drafter(own, n_draft, is_head=self.is_head)

    def close(self) -> None:
        self.model.close()
        if not self.is_head:
            self.model.file.close()

    def _loader(self, devices: Devices | None, **options: Any) -> Loader:
        n_seq = options["n_seq"]
        pool = options["n_pool"] or options["n_ctx"]
        if self.model.info.n_recurrent:  # a second sequence for guesses, with a block of its own
            options |= {"n_seq": 2 * n_seq, "n_pool": pool + pool_size(n_seq, 1)}
        return Loader(self.model, devices=devices, **options | {"sparsity": "auto", "n_batch": N_BATCH})


def check_n_draft(n_draft: int | None) -> int:
    """Tokens that are guessed at a time."""
    if n_draft is None:
        return N_DRAFT
    if isinstance(n_draft, bool) or not isinstance(n_draft, int) or not 1 <= n_draft <= 15:
        raise ArgumentError(f"n_draft is {n_draft!r}, it must be a whole number from 1 to 15")
    return n_draft


def _check_vocabulary(file: ModelFile, other: ModelFile) -> None:
    """Token ids must mean the same. The longer list may go on beyond the shorter one: files are padded."""
    names = [f.metadata.get("tokenizer.ggml.tokens") for f in (file, other)]
    if names[0] is None or names[1] is None:
        raise ArgumentError("a draft model and its model need tokenizers, and one of the files has none")
    n = min(len(names[0]), len(names[1]))
    for i in range(n):
        if names[0][i] != names[1][i]:
            raise ArgumentError(
                f"{other.path.name} cannot draft for {file.path.name}: token {i} is {names[1][i]!r} there, "
                f"{names[0][i]!r} here"
            )
