"""How byte-level BPE vocabularies cut text into words before merging.

A GGUF file names its scheme in `tokenizer.ggml.pre`. A scheme is a list of regular expressions: the first is
applied to the text, each next one to the pieces that the ones before left; matches and the gaps between them
all become pieces, and no look-ahead crosses a piece. The patterns are written for the Oniguruma engine of the
`tokenizers` library. Source of names and patterns: the published tokenizer files of the models and
llama.cpp's list of schemes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_CONTRACTION = r"(?:'[sSſ]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_ASCII_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"


def _cl100k(digits: str, marks: str = "") -> str:
    """The pattern family of Llama 3 and Qwen.

    digits: how long a run of digits may be. marks: what belongs to words beside letters.
    """
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{marks}]+|{digits}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# Only ASCII letters have a case here, as in llama.cpp; for other scripts every letter is both.
_ASCII_CASE = (r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]")
_CASE = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]")


def _cased(tail: str, digits: str, *, case: tuple[str, str] = _ASCII_CASE, after: str = r"[\r\n/]*") -> str:
    """The pattern family that cuts where the letter case changes (Tekken, GPT-4o).

    case: letters that begin a word, and those that go on with it. after: what punctuation takes along.
    """
    upper, lower = case
    head = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{head}{upper}*{lower}+{tail}|{head}{upper}+{lower}*{tail}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{after}|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# The letters of DeepSeek's first tokenizer: Latin, Greek, Cyrillic, Armenian, Georgian, Cherokee and some
# plane-1 alphabets with case. Written as in its tokenizer file.
_DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
# White space inside these two ranges does not count as part of them.
_DEEPSEEK_EAST_ASIA = "[[一-龥ࠀ-一가-\ud7ff]&&[^\\s]]+"
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~！-／：-～‘-‟、-。]+"


@dataclass(frozen=True)
class PreTokenizer:
    """One scheme: its patterns, and what llama.cpp ties to its name.

    ignore_merges: a word that is a token as a whole is taken as it is. add_bos: the default where the file
    says nothing. default_bos: False where the usual default id of the BOS token does not apply.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    default_bos: bool = True

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The scheme as a `tokenizers` object; its last step writes each byte as one printable character."""
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence(
            [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


_LLAMA3 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_cl100k(r"\p{N}"),))
_PLAIN = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3_WORDS))
# Han, kana, Kangxi radicals, Thai, Lao, Khmer, Myanmar and Hangul, which have no spaces or are cut apart.
_ASIA = (
    "\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff"
)
_NO_HAN = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
)
_JAIS_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
_GPT4O = PreTokenizer((_cased(_ASCII_CONTRACTION + "?", r"\p{N}{1,3}"),))

_SCHEMES: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer((_PUNCTUATION + "]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA3),
    ("dbrx smaug-bpe", PreTokenizer(_LLAMA3.patterns)),
    ("chatglm-bpe", PreTokenizer(_LLAMA3.patterns, default_bos=False)),
    ("glm4", PreTokenizer(_LLAMA3.patterns, ignore_merges=True, default_bos=False)),
    (
        "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan grok-2 solar-open f2llmv2 bailingmoe "
        "bailingmoe2 llada-moe",
        _QWEN2,
    ),
    ("qwen35", PreTokenizer((_cl100k(r"\p{N}", marks=r"\p{M}"),))),
    ("falcon", PreTokenizer((_PUNCTUATION + "`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    ("gpt-2 phi-2 mpt olmo jais exaone4 trillion gigachat mellum a.x-4.0 granite-docling", _PLAIN),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", _SINGLE_DIGITS),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                _DEEPSEEK_PUNCTUATION,
                r"\s+$",
                _DEEPSEEK_EAST_ASIA,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_EAST_ASIA, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense joyai-llm", _DEEPSEEK3),
    ("tekken", PreTokenizer((_cased("", r"\p{N}"),), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 minimax-m2 kanana2", _GPT4O),
    (
        "tiny_aya cohere2moe",
        PreTokenizer(
            (
                r"\d{1,3}(?=(?:\d{3})*\b)",
                _cased(_ASCII_CONTRACTION + "?", r"\p{N}{1,3}", case=_CASE),
            )
        ),
    ),
    (
        "kimi-k2",
        PreTokenizer(
            (r"\p{Han}+|" + _cased(_ASCII_CONTRACTION + "?", r"\p{N}{1,3}", case=_NO_HAN, after=r"[\r\n]*"),)
        ),
    ),
    (
        "youtu",
        PreTokenizer(
            (
                "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
                _cased(_ASCII_CONTRACTION + "?", r"\p{N}", case=_CASE),
            ),
            ignore_merges=True,
        ),
    ),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    (
        "seed-coder",
        PreTokenizer((_cl100k(r"\p{N}").replace(r"[^\s\p{L}\p{N}]+[\r\n]*|", r"[^\s\p{L}\p{N}\r\n]+|"),)),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    # Runs of digits in threes, counted from their end.
    (
        "afmoe",
        PreTokenizer(
            (r"\p{N}+", r"\p{N}{1,3}(?=(?:\p{N}{3})*\z)", f"[{_ASIA}]+", _DEEPSEEK3_WORDS),
        ),
    ),
    (
        "jais2",
        PreTokenizer((_cl100k(r"\p{N}{1,3}").removesuffix(r"|\s+(?!\S)|\s+") + rf"|{_JAIS_SPACES}|\s",)),
    ),
    ("laguna", PreTokenizer((r"[^\n]+|[\n]+", _cl100k(r"\p{N}")))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: scheme for names, scheme in _SCHEMES for name in names.split()
}
"""Scheme by its name in `tokenizer.ggml.pre`."""

PRE_BY_ARCHITECTURE: dict[str, str] = {
    "falcon": "falcon",
    "opt": "gpt-2",
    "gpt2": "gpt-2",
    "gptneox": "gpt-2",
    "phi2": "gpt-2",
    "mpt": "mpt",
    "starcoder": "starcoder",
    "starcoder2": "starcoder",
    "refact": "refact",
    "command-r": "command-r",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "stablelm": "stablelm2",
}
"""Scheme name by `general.architecture`, for files from before the key existed (all PowerInfer files are)."""
