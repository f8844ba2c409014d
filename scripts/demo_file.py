"""Tokenizer, token layout and GGUF file of the demo model.

The tokenizer is SentencePiece BPE with byte fallback and split digits, without a space in front of a text. A
conversation is laid out as ChatML, and exactly as a runtime tokenises the rendered template: control tokens
are ids, the text between two of them is one piece for SentencePiece.

    <s> <|im_start|> "user\\nHello" <|im_end|> "\\n" <|im_start|> "assistant\\nHi." <|im_end|> "\\n" ...

The file is a PowerInfer GGUF: an ordinary GGUF version 3 whose first four bytes are `PWRI`.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
from numpy.typing import NDArray

UNK, BOS, EOS, IM_START, IM_END = range(5)
CONTROL = ("<|im_start|>", "<|im_end|>")
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

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6


def train_tokenizer(lines: Iterable[str], n_vocab: int) -> bytes:
    """A serialised SentencePiece BPE model of `n_vocab` pieces, learned from `lines`."""
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
        control_symbols=list(CONTROL),
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
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=self.model)
        assert self._processor.piece_to_id(CONTROL[1]) == IM_END

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

    def columns(self) -> tuple[list[bytes], list[float], list[int]]:
        """Tokens, scores and types as the file has them."""
        processor = self._processor
        tokens, scores, types = [], [], []
        for i in range(self.n_vocab):
            tokens.append(processor.id_to_piece(i).encode())
            scores.append(float(processor.get_score(i)))
            if processor.is_unknown(i):
                types.append(_UNKNOWN)
            elif processor.is_control(i):
                types.append(_CONTROL)
            else:
                types.append(_BYTE if processor.is_byte(i) else _NORMAL)
        return tokens, scores, types


def tensor_type(name: str, ndim: int) -> gguf.GGMLQuantizationType:
    """Vectors stay float32, the embedding and the output head are Q8_0, every other matrix is Q4_0."""
    if ndim == 1:
        return gguf.GGMLQuantizationType.F32
    if name in ("token_embd.weight", "output.weight"):
        return gguf.GGMLQuantizationType.Q8_0
    return gguf.GGMLQuantizationType.Q4_0


def quantised(name: str, values: NDArray[np.float32]) -> tuple[gguf.GGMLQuantizationType, NDArray[Any]]:
    kind = tensor_type(name, values.ndim)
    return kind, values if kind == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(values, kind)


def dequantised(tensors: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """The weights as a reader of the file gets them."""
    result = {}
    for name, values in tensors.items():
        kind, data = quantised(name, values)
        result[name] = values if data is values else gguf.quants.dequantize(data, kind).astype(np.float32)
    return result


def write_file(
    path: Path,
    *,
    sizes: Mapping[str, int],
    rope_base: float,
    norm_eps: float,
    tokenizer: Tokenizer,
    tensors: Mapping[str, NDArray[np.float32]],
    counts: NDArray[np.uint32],
    n_counted: int,
    threshold: float,
    description: str,
) -> None:
    """Write the PowerInfer GGUF file. `sizes` has the keys of `demo_model.Shape`; counts [n_layer, n_ff]."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("PowerInfer demo")
    writer.add_description(description)
    writer.add_license("MIT")
    writer.add_languages(["en"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(sizes["n_ctx"])
    writer.add_embedding_length(sizes["n_embd"])
    writer.add_block_count(sizes["n_layer"])
    writer.add_feed_forward_length(sizes["n_ff"])
    writer.add_rope_dimension_count(sizes["n_embd"] // sizes["n_head"])
    writer.add_head_count(sizes["n_head"])
    writer.add_head_count_kv(sizes["n_head_kv"])
    writer.add_layer_norm_rms_eps(norm_eps)
    writer.add_rope_freq_base(rope_base)
    writer.add_vocab_size(sizes["n_vocab"])

    writer.add_float32("powerinfer.sparse_threshold", threshold)
    writer.add_string("powerinfer.hidden_act", "relu")
    writer.add_key_value(
        "powerinfer.neuron.counts",
        counts.reshape(-1).tolist(),
        gguf.GGUFValueType.ARRAY,
        sub_type=gguf.GGUFValueType.UINT32,
    )
    writer.add_uint64("powerinfer.neuron.tokens", n_counted)

    tokens, scores, types = tokenizer.columns()
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(IM_END)
    writer.add_unk_token_id(UNK)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    for name, values in tensors.items():
        kind, data = quantised(name, np.ascontiguousarray(values, dtype=np.float32))
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open(path, "r+b") as file:
        file.write(b"PWRI")


def read_tensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """Every tensor of a file written by `write_file`, dequantised, by name."""
    with tempfile.NamedTemporaryFile(suffix=".gguf") as copy:
        with open(path, "rb") as file:
            shutil.copyfileobj(file, copy)
        copy.seek(0)
        copy.write(b"GGUF")
        copy.flush()
        reader = gguf.GGUFReader(copy.name)
        return {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32, copy=True)
            for t in reader.tensors
        }
