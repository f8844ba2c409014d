"""Formulas: what becomes MathML, what stays text, and that nothing in them can do harm."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.page.test_markdown import RENDER

MATH = """async ([tex, display]) => {
    const { mathNode } = await import("./tex.js");
    return mathNode(tex, display)?.innerHTML ?? null;
}"""


def plain(html: str) -> str:
    """Without attributes."""
    return re.sub(r"<(\w+) [^>]*>", r"<\1>", html)


FORMULAS = {
    r"\frac{a}{b}": "<mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac>",
    r"\frac12": "<mfrac><mn>1</mn><mn>2</mn></mfrac>",
    "x^2_i": "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>",
    "x^10": "<msup><mi>x</mi><mn>1</mn></msup><mn>0</mn>",
    "3.14": "<mn>3.14</mn>",
    "f''": "<msup><mi>f</mi><mo>′′</mo></msup>",
    r"\sqrt{x}\sqrt[3]y": "<msqrt><mrow><mi>x</mi></mrow></msqrt><mroot><mi>y</mi><mn>3</mn></mroot>",
    r"\alpha\Omega": "<mi>α</mi><mi>Ω</mi>",
    r"\sum_{k=1}^n k": "<munderover><mo>∑</mo><mrow><mi>k</mi><mo>=</mo><mn>1</mn></mrow>"
    "<mi>n</mi></munderover><mi>k</mi>",
    r"\int_0^1": "<msubsup><mo>∫</mo><mn>0</mn><mn>1</mn></msubsup>",
    r"\lim_{x\to0}f": "<munder><mo>lim</mo><mrow><mi>x</mi><mo>→</mo><mn>0</mn></mrow></munder>"
    "<mspace></mspace><mi>f</mi>",
    r"\left(x\right]": "<mrow><mo>(</mo><mi>x</mi><mo>]</mo></mrow>",
    r"\mathbb{R}\mathcal L\mathfrak{C}\mathbf{a1}": "<mrow><mi>ℝ</mi></mrow><mi>ℒ</mi><mrow><mi>ℭ</mi></mrow>"
    "<mrow><mi>𝐚</mi><mn>𝟏</mn></mrow>",
    r"\text{if } x \ge \operatorname{rank} A": "<mtext>if&nbsp;</mtext><mi>x</mi><mo>≥</mo><mo>rank</mo>"
    "<mspace></mspace><mi>A</mi>",
    r"\begin{pmatrix}1&0\\0&1\end{pmatrix}": "<mrow><mo>(</mo><mtable>"
    "<mtr><mtd><mn>1</mn></mtd><mtd><mn>0</mn></mtd></mtr>"
    "<mtr><mtd><mn>0</mn></mtd><mtd><mn>1</mn></mtd></mtr></mtable><mo>)</mo></mrow>",
    r"a &= b \\ &= c": "<mtable><mtr><mtd><mi>a</mi></mtd><mtd><mo>=</mo><mi>b</mi></mtd></mtr>"
    "<mtr><mtd></mtd><mtd><mo>=</mo><mi>c</mi></mtd></mtr></mtable>",
    r"\hat x \overline{ab}": "<mover><mi>x</mi><mo>^</mo></mover>"
    "<mover><mrow><mi>a</mi><mi>b</mi></mrow><mo>‾</mo></mover>",
    r"a \not= b, \not\in": "<mi>a</mi><mo>≠</mo><mi>b</mi><mo>,</mo><mo>∉</mo>",
    r"\nosuch{x}": r"<mtext>\nosuch</mtext><mrow><mi>x</mi></mrow>",
    r"<b>\text{<i>}": "<mo>&lt;</mo><mi>b</mi><mo>&gt;</mo><mtext>&lt;i&gt;</mtext>",
}


def test_formulas(page: Any) -> None:
    made = {tex: plain(page.evaluate(MATH, [tex, True]) or "") for tex in FORMULAS}
    assert made == FORMULAS


def test_a_minus_is_a_sign_or_an_operator(page: Any) -> None:
    html = page.evaluate(MATH, ["-a - b = -c (-d)", False])
    assert re.findall(r'<mo( form="prefix")?>−', html) == [' form="prefix"', "", *[' form="prefix"'] * 2]


BROKEN = [
    *("{", "}", "a}", r"\frac{a}", r"\left( x", r"\left x \right)", "x^2^3", "^", "_", ""),
    *(r"\begin{nope}x\end{nope}", r"\begin{matrix}a\end{pmatrix}", r"\end{matrix}", r"\right)"),
    *(r"\sqrt[3", r"\text{", "{" * 60 + "}" * 60),
]


def test_what_cannot_be_read_is_none(page: Any) -> None:
    assert [tex for tex in BROKEN if page.evaluate(MATH, [tex, False]) is not None] == []


def math(html: str) -> str:
    """The text in its parts: formulas in brackets."""
    short = re.sub(r"<math[^>]*alttext=\"([^\"]*)\".*?</math>", r"[\1]", html)
    return re.sub(r"<[^>]*>", "", short)


TEXTS = {
    r"a \(x+1\) b": "a [x+1] b",
    "so $x$, $y_1$-axis ($z$).": "so [x], [y_1]-axis ([z]).",
    "It costs $5 or $10.": "It costs $5 or $10.",
    "from $5-$10, US$5 to US$6": "from $5-$10, US$5 to US$6",
    "$HOME/$USER and $PATH": "$HOME/$USER and $PATH",
    r"\$5 and \$6": "$5 and $6",
    "$ x $": "$ x $",
    "`$x$` $y$": "$x$ [y]",
    "*a $x*y$ b* $a_1$ and $b_1$": "a [x*y] b [a_1] and [b_1]",
    "**The $x$ of \\(y\\)**": "The [x] of [y]",
    r"\[x\] in a line": "[x] in a line",
    "$$x$$": "[x]",
    "$$\nx\n\n- y\n$$\nafter": "[x\n\n- y]after",
    "- a\n  $$\n  x\n  $$\n- b": "a[x]b",
    "a | b\n--|--\n$x$ | y": "ab[x]y",
    "$$\nnot closed": "$$not closed",
    r"\(not closed, \[neither": "(not closed, [neither",
    "broken $\\frac{1$ here": "broken $\\frac{1$ here",
    "# The $x$": "The [x]",
}


def test_where_formulas_are(page: Any) -> None:
    assert {text: math(page.evaluate(RENDER, text)) for text in TEXTS} == TEXTS


def test_nothing_in_a_formula_is_an_element(page: Any) -> None:
    page.evaluate("() => { window.alert = () => { throw new Error('it ran'); }; }")
    html = page.evaluate(
        RENDER,
        r"""$$\text{<img src=x onerror=alert(1)>} \href{javascript:alert(1)}{x} \class{a}{b}  \style{a:b}{x}
        \color{red}" onload="alert(1) <script>alert(1)</script> \begin{array}{"><img src=x>}a\end{array}$$""",
    )
    assert "<math" in html
    tags = set(re.findall(r"<(\w+)", html))
    assert tags <= {"div", "math", "mrow", "mi", "mo", "mn", "mtext", "mtable", "mtr", "mtd", "mspace"}
    names = set(re.findall(r' ([\w-]+)="', re.sub(r'alttext="[^"]*"', "", html)))
    own = ("class", "tabindex", "role", "aria-label", "dir", "display", "form", "stretchy", "lspace")
    assert names <= {*own, "rspace", "mathvariant", "width", "fence"}


@pytest.mark.parametrize(
    "text",
    [
        "$x " * 8000,
        "$x$" * 8000,
        "\\(" * 10000,
        "\\[x\n" * 5000,
        "$$\n" * 7001,
        "*a \\( " * 3000,
        "$$" + "{" * 3900 + "}" * 3900 + "$$",
        "$$" + "\\frac" * 1500 + "$$",
        "$$" + "x^" * 3900 + "$$",
        "$$" + "\\left(" * 1200 + "$$",
        "$$" + "\\begin{matrix}" * 500 + "$$",
        "$$" + "&" * 7900 + "$$",
        "$$" + "\\sqrt[" * 1200 + "$$",
        "$$" + "'" * 7900 + "$$",
    ],
)
def test_hostile_formulas_take_little_time(page: Any, text: str) -> None:
    assert page.evaluate(RENDER, text)
