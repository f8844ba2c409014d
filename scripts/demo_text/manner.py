"""How users type, and system messages with what they do to the answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from .exchange import Memory
from .grammar import capital, chance, pick, say
from .knowledge import CAPITALS, DAYS, MONTHS
from .words import person_name

_NEIGHBOURS = {
    "a": "s",
    "s": "a",
    "e": "r",
    "r": "e",
    "t": "r",
    "o": "p",
    "i": "o",
    "n": "m",
    "l": "k",
    "h": "g",
    "u": "i",
    "c": "v",
    "d": "f",
    "m": "n",
}


def _slip(rng: Random, text: str, keep: tuple[str, ...]) -> str:
    """A slip of the keyboard in one longer word."""
    words = text.split(" ")
    places = [i for i, w in enumerate(words) if len(w) > 3 and w.isalpha() and w.islower() and w not in keep]
    if not places:
        return text
    i = pick(rng, places)
    word = words[i]
    at = 1 + int(rng.random() * (len(word) - 2))
    kind = rng.random()
    if kind < 0.35:
        word = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    elif kind < 0.65:
        word = word[:at] + word[at + 1 :]
    elif kind < 0.8:
        word = word[:at] + word[at] + word[at:]
    else:
        word = word[:at] + _NEIGHBOURS.get(word[at], "e") + word[at + 1 :]
    words[i] = word
    return " ".join(words)


_CASED = {
    w.lower(): w
    for w in (
        *DAYS,
        *MONTHS,
        "PowerInfer",
        "Python",
        "GGUF",
        "GPU",
        "CPU",
        "VRAM",
        "ReLU",
        "FFN",
        "LLM",
        "AI",
        "KV",
        "Llama",
        "Windows",
        "Linux",
        "MIT",
        "API",
        "English",
        "German",
        "French",
        "Spanish",
        "Mars",
        "Jupiter",
        "Earth",
    )
}
_CASED.update({w.lower(): w for pair in CAPITALS for place in pair for w in place.split() if w[0].isupper()})
_CASED.update({"i": "I", "i'm": "I'm", "i'd": "I'd", "i'll": "I'll"})
del _CASED["march"], _CASED["may"]
_WORD = re.compile(r"[A-Za-z']+")


def _proper(text: str) -> str:
    """Names and abbreviations with their capitals."""
    return _WORD.sub(lambda m: _CASED.get(m.group(), m.group()), text)


_SHORT = {
    "you": "u",
    "are": "r",
    "your": "ur",
    "please": "plz",
    "what's": "whats",
    "thanks": "thx",
    "people": "ppl",
    "because": "cuz",
}


def _short_forms(text: str) -> str:
    """The way of short messages: how r u."""
    return _WORD.sub(lambda m: _SHORT.get(m.group(), m.group()), text.lower())


def typed(rng: Random, text: str, keep: tuple[str, ...]) -> str:
    """The user's words the way people type them."""
    if chance(rng, 0.08):
        text = pick(rng, ("please ", "hey, ", "so ", "and ", "now ", "ok, ", "well, ", "hi, ", "um, ")) + text
    if chance(rng, 0.02):
        return _short_forms(text)
    while chance(rng, 0.09):
        text = _slip(rng, text, tuple(k.lower() for k in keep))
    form = rng.random()
    if form < 0.5:
        text = capital(_proper(text) if chance(rng, 0.8) else text)
    elif form < 0.6:
        text = _proper(text)
    elif form < 0.8:
        pass
    elif form < 0.96:
        text = text.lower()
    else:
        text = text.upper()
    if text.endswith("?") and text[-2:-1].isalnum() and chance(rng, 0.3):
        text = text[:-1]
    elif text[-1:].isalnum() and chance(rng, 0.35):
        text += pick(
            rng,
            (
                ".",
                ".",
                "!",
                " please",
                "?" if text.lower().startswith(("what", "who", "can", "do ", "how")) else ".",
            ),
        )
    return text


_PLAIN_SYSTEMS = [
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a helpful, honest and harmless assistant.",
    "You are PowerInfer's demo model.",
    "Be kind and helpful.",
    "Answer the user's questions.",
    "You are a chat bot.",
    "You are an AI assistant.",
    "Help the user.",
    "You are a tiny model. Be honest about it.",
    "You are a small language model that runs on a CPU.",
    "Be polite.",
    "Talk with the user.",
    "Answer in simple English.",
    "You are a storyteller.",
    "A chat between a curious user and an assistant.",
    "Be honest when you do not know something.",
]


def _pirate(rng: Random, text: str) -> str:
    return pick(rng, ("Arr! ", "Ahoy! ", "Arr, matey! ", "Yo ho! ")) + text


def _polite(rng: Random, text: str) -> str:
    return pick(rng, ("Dear friend: ", "With pleasure: ", "My dear friend, listen: ")) + text


def first_sentence(rng: Random, text: str) -> str:
    for end in (". ", "! ", "? "):
        head, mark, _ = text.partition(end)
        if mark and len(head) > 12:
            return head + end[0]
    return text


def system(rng: Random, memory: Memory) -> tuple[str, Callable[[Random, str], str] | None]:
    """A system message and what it does to the answers."""
    form = rng.random()
    if form < 0.62:
        return pick(rng, _PLAIN_SYSTEMS), None
    if form < 0.74:
        memory.own_name = person_name(rng)
        return say(
            rng,
            [
                "Your name is {n}.",
                "You are {n}, a [friendly|helpful] assistant.",
                "You are called {n}. [Be friendly.|]",
                "You are an assistant with the name {n}.",
            ],
            {"n": memory.own_name},
        ), None
    if form < 0.84:
        memory.facts["name"] = person_name(rng)
        return say(
            rng,
            [
                "The user is called {n}.",
                "The name of the user is {n}.",
                "You talk to {n}.",
                "[You are a helpful assistant. |]The user's name is {n}.",
            ],
            {"n": memory.facts["name"]},
        ), None
    if form < 0.91:
        return say(
            rng,
            [
                "You are a pirate.",
                "Talk like a pirate.",
                "You are a friendly pirate. [Answer like one.|]",
                "Speak like a pirate, please.",
            ],
        ), _pirate
    if form < 0.94:
        return say(
            rng, ["You are very polite and call the user your dear friend.", "Be very polite."]
        ), _polite
    return say(
        rng,
        [
            "Answer in one sentence.",
            "Keep your answers short.",
            "Be brief.",
            "Answer briefly.",
            "Give very short answers.",
        ],
    ), first_sentence
