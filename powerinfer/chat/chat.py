"""A chat: one conversation with one model, answering questions and showing what each answer took."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .. import Llama
from .._text.reasoning import template_variables
from .._text.terminal import Bar
from ..errors import ContextError
from .conversation import Conversation
from .ui import Ui

ADVICE = (
    "/reset forgets the conversation; --n-ctx makes the context larger, --context-shift forgets by itself"
)


@dataclass
class Work:
    """FFN neurons, counted over the tokens of one answer."""

    computed: int = 0
    pairs: int = 0
    """(neuron, token) pairs that there were."""
    active: int = 0
    on_device: int = 0
    """Of the active ones, those whose neuron lies on a device."""
    routes: int = 0
    """Uses of experts."""
    routes_on_device: int = 0

    def count(self, llm: Llama, n_neurons: int) -> None:
        """Adds the last step."""
        for step in llm.last_step:
            self.computed += step.n_computed
            self.pairs += step.n_sparse * n_neurons
            self.active += step.n_active
            self.on_device += step.n_active_device
            self.routes += step.n_routes
            self.routes_on_device += step.n_routes_device

    @property
    def share(self) -> str:
        if self.routes and self.computed == self.pairs:
            return ""  # of a mixture's experts all neurons
        return f"{self.computed / self.pairs:.1%} of neurons computed" if self.pairs else ""

    @property
    def hits(self) -> str:
        """The hit rate: of the neurons that were active, those on the GPU; of a mixture, of the experts."""
        if self.routes:
            return f"{self.routes_on_device / self.routes:.0%} of the chosen experts on the GPU"
        return f"{self.on_device / self.active:.1%} of the active ones on the GPU" if self.active else ""


class Chat:
    """A conversation with one model, shown by one Ui."""

    def __init__(
        self,
        llm: Llama,
        ui: Ui,
        conversation: Conversation,
        *,
        forgets: bool = False,
        think: str | None = None,
    ) -> None:
        """forgets: older turns make room when the conversation no longer fits in the context.
        think: whether, or how much, the model thinks before it answers; None: as its template does."""
        self.forgets = forgets
        self.think = think
        self.llm = llm
        self.ui = ui
        self.conversation = conversation
        self.file: Path | None = None
        """Where this conversation was saved, or loaded from."""
        self.hinted = False
        """Whether the last thing shown said how the chat ends."""
        ui.toolbar = self.toolbar

    def check(self) -> None:
        """Raises what the first answer would raise in any case; a notice about the chat format comes now."""
        _ = self.llm.tokenizer, self.llm.chat_format
        self.conversation.check(self.llm.n_vocab())

    def answer(self, question: str) -> None:
        """One question. Ctrl-C keeps what was said so far; an error takes the question back."""
        while not self._answer(question):
            self.ui.note("The context is full: the older half of the conversation is forgotten.")

    def _answer(self, question: str) -> bool:
        """Answers, or makes room and returns False."""
        bar = Bar("reading the prompt")
        self.llm.prompt_progress = bar
        try:
            chunks = self.llm.create_chat_completion(
                self.conversation.messages(question),
                stream=True,
                chat_template_kwargs=template_variables(self.think),
                **self.conversation.settings,
            )
        except ContextError as error:
            if self.forgets and self.conversation.forget_half():
                return False
            raise ContextError(f"{error}. {ADVICE}") from error
        llm, n_neurons = self.llm, self.llm.info().n_neurons
        parts: list[str] = []
        work, reason, thinks = Work(), None, False
        with self.ui.answering(), bar:
            for chunk in chunks:
                choice = chunk["choices"][0]
                text, reason = choice["delta"].get("content") or "", choice["finish_reason"]
                thought = choice["delta"].get("reasoning_content")
                if thought:
                    thinks = True
                    bar.close()
                    self.ui.think(thought)
                if not parts:
                    text = text.lstrip()
                if text:
                    bar.close()
                    parts.append(text)
                    self.ui.write(text)
                if "content" in choice["delta"] or thought:
                    work.count(llm, n_neurons)
        if not parts and reason is None:
            self.ui.note("Stopped before the answer began; the question is taken back.")
            return True
        self.conversation.add(question, "".join(parts))
        if reason == "length" and llm.n_tokens >= llm.n_ctx():
            self.ui.note(f"The context of {llm.n_ctx()} tokens is full, so the answer ends here. {ADVICE}.")
        elif thinks and not parts:
            self.ui.note("The answer ended within its thought; /set think off asks for none.")
        elif reason == "length" and self.ui.interactive:
            self.ui.note("The answer ends here because it reached max_tokens.")
        if self.ui.interactive:
            self.ui.note(self.status(work, stopped=reason is None) + "\n")
        return True

    def status(self, work: Work, *, stopped: bool) -> str:
        """Speed of decode, share of neurons computed, context used."""
        speed = self.llm.timings.tokens_per_s
        facts = (
            "stopped" if stopped else "",
            f"{speed:.1f} tokens/s" if speed else "",
            work.share,
            work.hits if self.uses_device else "",
            self._context_used(),
        )
        return " · ".join(fact for fact in facts if fact)

    @property
    def uses_device(self) -> bool:
        return self.llm.plan is not None and self.llm.plan.uses_device

    def toolbar(self) -> str:
        """What matters before a question: the room that is left, and how the model runs."""
        return (
            f"{self._context_used()} · {self.llm.info().sparsity} · {self.llm.describe().partition(':')[0]}"
        )

    def _context_used(self) -> str:
        return f"context {self.llm.n_tokens}/{self.llm.n_ctx()}"
