"""Makes tokenizer_cases.json: two small vocabularies and what other programs do with them.

Run by hand where the `sentencepiece` and `tokenizers` packages are installed; the tests read the result
alone.

`spm`  a SentencePiece BPE vocabulary with byte fallback, trained here; ids by the sentencepiece library.
`bpe`  a byte-level BPE vocabulary, trained here; ids by the tokenizers library's own ByteLevel
       pre-tokenizer, whose splitting rule is compiled in (it is the scheme that GGUF files call "gpt-2").
"""

from __future__ import annotations

import io
import json
import pathlib

import sentencepiece
import tokenizers

TEXT = """\
The quick brown fox jumps over the lazy dog, and the dog doesn't mind at all.
She said: "We'll see what they're doing; I'd rather not, but you've asked me."
Numbers like 7, 42, 365 and 1234567 are written with digits; so is 3.14159.
A neuron that is not active need not be computed: its row is neither read nor added.
Der schnelle braune Fuchs springt über den faulen Hund. Größe, Übermut, Straße.
Le café est fermé; où allons-nous manger ce soir? Ça dépend de l'été.
Быстрая лиса прыгает через ленивую собаку. Ещё раз!
敏捷的棕色狐狸跳过了懒狗。今天天气很好。
def add(a, b):
    # the sum of both
    return a + b

for i in range(10):
    print(add(i, i * 2))
A row is read, a row is skipped, and the rest of the rows wait for the next token.
There is a place where the river bends and the old mill stands with its wheel at rest.
"""

CASES = [
    "",
    " ",
    "  ",
    "    ",
    "a",
    " a",
    "a ",
    "  two  spaces   three ",
    "The quick brown fox",
    "the dog doesn't mind",
    "We'll see what they're doing, you've I'd it's DON'T WE'LL",
    "1 12 123 1234 3.14159",
    "tabs\tand\nnew\n\nlines\n\n\n  indented\n",
    "\r\n\r\n windows \r\n",
    "Größe Übermut Straße café où été",
    "Быстрая лиса",
    "敏捷的棕色狐狸，你好",
    "emoji 🦙🚀 and 👨‍👩‍👧 joined",
    "punctuation!!! ... (really?) [yes] {no} <b>x</b> a_b-c*d",
    "no-break\u00a0space and ideographic\u3000space",
    "    return a + b  # done",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "▁ the space mark itself",
    "mixed中文and English",
    "e\u0301 combining",
    "<s> </s> <unk> are text here",
    "<0x41> is text, too",
]


def make_spm() -> dict[str, object]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=460,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    size = processor.get_piece_size()
    kinds = []
    for i in range(size):
        unknown, control, byte = processor.is_unknown(i), processor.is_control(i), processor.is_byte(i)
        kinds.append(2 if unknown else 3 if control else 6 if byte else 1)
    return {
        "tokens": [processor.id_to_piece(i) for i in range(size)],
        "scores": [processor.get_score(i) for i in range(size)],
        "types": kinds,
        "cases": [[text, processor.encode(text)] for text in CASES],
    }


def make_bpe() -> dict[str, object]:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return {
        "tokens": sorted(model["vocab"], key=model["vocab"].__getitem__),
        "merges": [" ".join(pair) for pair in model["merges"]],
        "cases": [[text, tokenizer.encode(text).ids] for text in CASES],
    }


if __name__ == "__main__":
    path = pathlib.Path(__file__).with_name("tokenizer_cases.json")
    data = {"spm": make_spm(), "bpe": make_bpe()}
    path.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{path.name}: {path.stat().st_size} bytes")
