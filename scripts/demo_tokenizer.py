"""Tokenizer of the demo model, and how a conversation is laid out for it.

The tokenizer is SentencePiece BPE with byte fallback and split digits, without a space in front of a text. A
conversation is laid out as ChatML, and exactly as a runtime tokenises the rendered template: control tokens
are ids, the text between two of them is one piece for SentencePiece.

    <s> <|im_start|> "user\\nHello" <|im_end|> "\\n" <|im_start|> "assistant\\nHi." <|im_end|> "\\n" ...
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

UNK, BOS, EOS, IM_START, IM_END = range(5)
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
"""The pieces of the ids above."""
ASSISTANT = "assistant"
PLAIN = "plain"
"""Role of a text without a conversation around it: <s> text <|im_end|>."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] | trim) + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Message = tuple[str, str]
"""Role (system, user, assistant or plain) and text."""


def render(messages: Iterable[Message]) -> str:
    """A conversation as text with its control tokens written out; `Tokenizer.conversation` has its ids."""
    parts = [SPECIAL[BOS]]
    for role, text in messages:
        if role == PLAIN:
            parts.append(f"{text}{SPECIAL[IM_END]}")
        else:
            parts.append(f"{SPECIAL[IM_START]}{role}\n{text}{SPECIAL[IM_END]}\n")
    return "".join(parts)


def train_tokenizer(lines: Iterable[str], n_vocab: int) -> bytes:
    """A serialised SentencePiece BPE model of `n_vocab` pieces, learned from `lines`."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=n_vocab,
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=1.0,
        max_sentencepiece_length=20,
        control_symbols=list(SPECIAL[IM_START:]),
        unk_id=UNK,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=-1,
        num_threads=8,
        minloglevel=2,
    )
    return model.getvalue()


@dataclass
class Tokenizer:
    """A thin wrapper that knows the layout of a conversation."""

    model: bytes

    def __post_init__(self) -> None:
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor(model_proto=self.model)
        assert [self._processor.id_to_piece(i) for i in range(len(SPECIAL))] == list(SPECIAL)

    @property
    def n_vocab(self) -> int:
        return int(self._processor.get_piece_size())

    def text(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode(list(ids)))

    def conversation(self, messages: Iterable[Message]) -> tuple[list[int], list[bool]]:
        """Ids of a whole conversation, and for each id whether the model is the one who writes it."""
        ids, own = [BOS], [False]
        for role, text in messages:
            if role == PLAIN:
                piece = [*self.text(text), IM_END]
                ids += piece
                own += [True] * len(piece)
                continue
            head, newline = self.text(f"{role}\n"), self.text("\n")
            body = self.text(f"{role}\n{text}")
            mine = role == ASSISTANT
            assert body[: len(head)] == head
            ids += [IM_START, *body, IM_END, *newline]
            own += [False] * (1 + len(head)) + [mine] * (len(body) - len(head) + 1) + [False] * len(newline)
        return ids, own

    def prompt(self, messages: Iterable[Message]) -> list[int]:
        """Ids of the messages so far with the opening of the answer."""
        return [*self.conversation(messages)[0], IM_START, *self.text(f"{ASSISTANT}\n")]
