"""Rewrites answers, before math-verify reads them, where it misreads a notation or reads it differently with different
versions of its parser.

math-verify 0.9 with latex2sympy2-extended 1.11 reads `1 1/2` as 1, `1\\,234` as 235, `33\\frac{1}{3}\\%` as a third of
a per cent and `1e-3` as e - 3. It reads `50\\%` with ANTLR 4.13.2, but not with 4.9.3 and 4.11.0.
tests/environments/test_mathematical_text.py shows each case.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from functools import lru_cache

_NUMBER = r"(?:(?<!\d)(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_PART = r"(?:\{\d+\}|\d)"
_MIXED = rf"(?:(?:{_NUMBER}\s*)?\\[dtc]?frac\s*{_PART}\s*{_PART}|{_NUMBER})"
_TEXT = r"\\(?:text|textrm|textbf|mathrm|mbox)\s*"
_OPENING, _CLOSING = r"(?:^|\$|\{|\\\(|\\\[)", r"(?:$|\$|\}|\\\)|\\\])"
_SMALLEST, _LARGEST = -400, 400
"""Range of the exponents that are written out; numbers beyond it stay as they are."""


def _repeating(found: re.Match[str]) -> str:
    """The fraction that equals a repeating decimal, `0.1\\overline{6}` or `0.1\\dot{6}`."""
    whole, fixed, repeated = found[1], found[2], found[3] or "".join(filter(str.isdigit, found[4]))
    numerator = int(whole + fixed + repeated) - int(whole + fixed)
    return rf"\frac{{{numerator}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


def _improper(found: re.Match[str]) -> str:
    """The fraction that equals a mixed number."""
    whole, numerator, denominator = map(int, found.groups())
    return rf"\frac{{{whole * denominator + numerator}}}{{{denominator}}}"


def _improper_vulgar(found: re.Match[str]) -> str:
    """The fraction that equals `½` or `3½`."""
    numerator, denominator = unicodedata.normalize("NFKC", found[2]).split("\N{FRACTION SLASH}")
    return rf"\frac{{{int(found[1] or 0) * int(denominator) + int(numerator)}}}{{{denominator}}}"


def _without_separators(found: re.Match[str]) -> str:
    return "".join(filter(str.isdigit, found[0].replace(r"\ ", "")))


def _hundredths(found: re.Match[str]) -> str:
    # Not a fraction where there is none: math-verify prefers a fraction to the other numbers of a text.
    number = found[1].replace(",", "")
    return rf"\frac{{{number}}}{{100}}" if "\\" in number else positional(Decimal(number) / 100)


def _positional(found: re.Match[str]) -> str:
    return positional(found[0]) if _SMALLEST <= int(found[1]) <= _LARGEST else found[0]


_FOR_BOTH: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Currencies: `\$5`, `\text{\$}5`, `£5`, `5€`, `5 dollars`
        (rf"{_TEXT}\{{\s*(?:\\\$|[$£€¥])\s*\}}|\\\$|[£€¥¢]", ""),
        (r"(?<=\d)\s*(?:dollars?|euros?)\b", ""),
        # Per cent as a word or as text, and without the backslash within LaTeX: `50\%`
        (rf"(?<!\s)\s*{_TEXT}\{{\s*(?:\\?%|percent(?:age)?|pct)\s*\}}", r"\\%"),
        (r"(?<=[\d}])\s*(?:percent(?:age)?|pct)\b", r"\\%"),
        (rf"(?<=[\d}}])\s*%(?=\s*(?:{_CLOSING}|\\times|\\cdot))", r"\\%"),
        # Thousands: `1\,234`, `1{,}234`, `1.234.567`
        (r"(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.,])", _without_separators),
        (r"(?<![\d.,])\d{1,3}(?:(?:\\[,;:! ]|\{,\}|~|\u00a0|\u2009|\u202f)\d{3})+(?!\d)", _without_separators),
        # Mixed and vulgar fractions, repeating decimals
        (r"(?<![\d./,])(\d+)\s+(\d+)/(\d+)(?![\d/]|\.\d)", _improper),
        (r"(?<!\d)(\d+)\.(\d*)(?:\\overline\s*\{(\d+)\}|(\\dot\s*\{?\d\}?(?:\d*\\dot\s*\{?\d\}?)?))", _repeating),
        (r"√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\fbox(?=\s*\{)", r"\\boxed"),
        # A dash for a minus sign, and a full stop at the end of a box
        (r"(?<![\w)}])[‒–](?=\s*[\d\\])", "-"),
        (r"(?<=\w)\.(?=\s*\})", ""),
        # A space that math-verify does not know, and another sign of the empty set
        (r"(?<!\\)~(?=\s*\\)", r"\\ "),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        # Degrees Celsius and Fahrenheit
        (rf"(\^\s*\{{?\s*\\circ\s*\}}?)\s*(?:{_TEXT}\{{\s*[CF]\s*\}}|[CF](?![a-zA-Z]))", r"\1"),
        # Tuples, of which math-verify reads `\langle 1,2\rangle` as 1.2
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
    )
]
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp"
_SPACE = r"(?:\s|\\[ ,;:!]|\\q?quad)"
_UNIT = rf"(?:{_TEXT}\{{\s*)?(?!(?:and|or)\b)(?:[a-z]{{3,}}|hr?|mi|ft|in|yd|lb|oz|kg|[ckm]?m)\.?\s*\}}?"


def _quantity(found: re.Match[str]) -> str:
    """One name for a quantity in several units, of which math-verify would read the first number."""
    words = re.sub(rf"{_TEXT}|{_SPACE}|[{{}}.,]|\band\b", "", found[0])
    return rf"\text{{quantity{words}}}"


def _union(found: re.Match[str]) -> str:
    """The union of intervals that `x<1 \\text{ or } x>3` is, in either order."""
    ends = {
        ("<" if sign[0] == "<" or sign.startswith((r"\l", "≤")) else ">"): (sign, end)
        for sign, end in (found.group(2, 3), found.group(4, 5))
    }
    if len(ends) < 2:
        return found[0]
    (up_to, upper), (above, lower) = ends["<"], ends[">"]
    closing, opening = ")" if up_to in _STRICT else "]", "(" if above in _STRICT else "["
    return rf"(-\infty,{upper.strip()}{closing}\cup {opening}{lower.strip()},\infty)"


_STRICT = ("<", ">", r"\lt", r"\gt")
_SIGN = r"(<=?|>=?|[≤≥]|\\[lg](?:eqslant|eq?|t)(?![a-zA-Z]))"
_BOUND = r"([^<>=≤≥,a-zA-Z]*(?:\\(?:frac|sqrt|pi)[^<>=≤≥,a-zA-Z]*)*)"
_FOR_BOXES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Full hours, which are divisions by zero for math-verify, and times with a.m. or p.m.
        (
            rf"^\s*(\d\d?:\d\d){_SPACE}*(?:{_TEXT}\{{)?\s*([AaPp])\.?\s?[Mm]\.?\s*\}}?\s*$",
            lambda found: rf"\text{{{found[1]}{found[2].lower()}m}}",
        ),
        (r"^\s*(\d\d?:00)\s*$", r"\\text{\1}"),
        (r"~", r"\\ "),
        (r"(?<=[\w)])\*\*(?=[\w(-])", "^"),
        # `5 ft 6 in`, `1\text{ hour and }30\text{ minutes}`
        (
            rf"^\s*(?:{_TEXT}\{{\s*)?\d+{_SPACE}*{_UNIT}(?:{_SPACE}|[,}}]|{_TEXT}\{{|\band\b)*\d+{_SPACE}*{_UNIT}[\s}}]*$",
            _quantity,
        ),
        # `\{x \mid x>1\}`, whose condition says the same, and `k\pi, k \in \mathbb{Z}`
        (
            r"^\s*(?:\\left)?\\\{\s*(?:[a-z]|\([a-z, ]+\))\s*"
            r"(?:\\in\s*(?:\\math\w+\s*)?\{?[RNZ]\}?\s*)?(?:\\(?:mid|vert)(?![a-zA-Z])|[|:])"
            r"(.*?)(?:\\right)?\\\}\s*$",
            r"\1",
        ),
        (
            rf"(?<=[^\s,;:!(\\])(?:{_SPACE}|,|\(){{1,9}}[a-z]\s*\\in\s*(?:\\math\w+\s*)?\{{?[NZ]\}}?"
            r"(?:[\^_]\s*\{?[*+]\}?)*\s*\)?\s*$",
            "",
        ),
        (
            rf"^\s*([a-z])\s*{_SIGN}{_BOUND}(?:{_TEXT}\{{\s*or\s*\}}|\bor\b)\s*\1\s*{_SIGN}{_BOUND}$",
            _union,
        ),
        (r"^\s*[-+]?\d{1,3}(?: \d{3})+\s*$", lambda found: found[0].replace(" ", "")),
        # `1/2 x` is half of x, not 1/(2x)
        (r"(?<![\w./)}])(\d+)/(\d+)\s+(?=[a-zA-Z\\(])", r"\\frac{\1}{\2} "),
        # Names without a backslash, which are products of letters for math-verify: `cos(x)`, `ln 2`, `pi/4`
        (rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?=\s*[(^_]|\s+[\w\\])", r"\\\1"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![\\a-zA-Z])(?:[iI]nfinity|infty)(?![a-zA-Z])", r"\\infty "),
        # Units that math-verify does not know: `5 km/h`, `5 marbles`
        (
            r"(?<=[\d)}])\s+(?!and\b|or\b)"
            r"([a-zA-Z]+/[a-zA-Z]+|[a-zA-Z]{3,}(?: [a-zA-Z]+)*|(?:[cdkm]?m|ft|in|yd|mi)(?=\^))((?:\^\{?\d\}?)?)\s*$",
            r" \\text{\1}\2",
        ),
        # Words, which are products of letters for math-verify, so that `silent` would equal `listen`
        (r"^\s*(?:([a-zA-Z]{4,})|([a-zA-Z]{3,}(?: [a-zA-Z0-9]+)+))\s*$", r"\\text{\1\2}"),
    )
]
_SIGNS = {
    **{ord(character): ord(character) - 0xFEE0 for character in map(chr, range(0xFF01, 0xFF5F))},
    **{ord(sign): f"{latex} " for sign, latex in (("°", r"^\circ"), ("∞", r"\infty"), ("∪", r"\cup"), ("∩", r"\cap"))},
    ord("·"): r"\cdot ",
    ord("²"): "^2",
    ord("³"): "^3",
    ord("π"): r"\pi ",
}
"""Full-width characters and signs that math-verify cannot read."""
_VULGAR = re.compile(r"(?<!\d)(\d*) ?([¼-¾⅐-⅞])")
_E_NOTATION = re.compile(r"(?<![\w.\\}])\d+(?:\.\d+)?[eE]([-+]?\d+)(?!\w|\.\d|[{^])")
_SCIENTIFIC = re.compile(
    r"(?<![\w.\\})^_/])(\d+\.\d+)\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|(\d))(?![\d!^_{])"
)
"""`6.02 \\times 10^{23}`, which math-verify computes with rounding, unlike `6.02e23`."""
_PER_CENT = re.compile(rf"({_MIXED})\s*\\%")
_ONLY_PER_CENT = re.compile(rf"({_OPENING}\s*(?:[-+]\s*)?{_MIXED})\s*\\%(?=\s*{_CLOSING})")
_ENCLOSED = re.compile(
    r"\s*(?:\$\$([^$]+)\$\$|\$((?:\\\$|[^$])+)\$|"
    r"\\\(((?:(?!\\\)).)+)\\\)|\\\[((?:(?!\\\]).)+)\\\])\s*",
    re.DOTALL,
)
_LETTER = re.compile(rf"\\boxed\{{(?:{_TEXT}\{{)?\(?([A-H])\)?\}}?\}}")
_WITHIN_TEXT = re.compile(rf"\s*{_TEXT}\{{([^{{}}]*)\}}\s*")
_CHOICE = re.compile(
    rf"\s*(?:{_TEXT}\{{\s*\(?([A-H])\s*[).:]?\s*\}}{_SPACE}*|(?:\(\s*([A-H])\s*\)|([A-H])\s*[).:])(?:{_SPACE}+|$))"
    r"((?:[\w\\$(\[{.]|-[^\s-])(?:(?!\b[A-H]\s*[).:=]).)*)?",
    re.DOTALL,
)
"""A letter with a mark, and the value of the choice. Several letters are several values."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_LONE_DOLLAR = re.compile(r"(?<!\\)\$")  # a currency
_ENDS_IN_A_VARIABLE = re.compile(r"(?:[\d})]|(?:[-+*/^=(,<>]|\\[lg]e?q?)\s*)[a-zA-Z]\s*[}$]?$")


def positional(number: Decimal | str | float) -> str:
    """Writes a number without an exponent, with the digits that it has: `1e-05` becomes `0.00001`."""
    return format(Decimal(str(number)), "f")


def readings(text: str) -> tuple[str, str]:
    """Returns the text as math-verify shall read it, twice. In the first, `50\\%` and `1e-3` have their values, 50/100
    and 0.001; in the second an answer `50\\%` is the number 50, and `1e-3` is LaTeX, e - 3. An answer is right if the
    reference, read in the same way, equals it; so a reference of 50 accepts `50\\%`, and one of 0.5 does so too.

    Both are the same text if there is nothing that has two readings.
    """
    text = _in_boxes(_rewritten(_VULGAR.sub(_improper_vulgar, text.translate(_SIGNS)), _FOR_BOTH))
    text = _SCIENTIFIC.sub(lambda found: positional(f"{found[1]}e{found[2] or found[3]}"), text)
    values, written = _E_NOTATION.sub(_positional, text), _ONLY_PER_CENT.sub(r"\1", text)
    return _PER_CENT.sub(_hundredths, values), _PER_CENT.sub(_hundredths, written)


def last_box(text: str) -> str | None:
    """Returns the content of the last `\\boxed{}`, as in the solutions of MATH; None if there is no closed box."""
    *_, found = [None, *_boxes(text)]
    return text[slice(*found)].strip() if found else None


def _boxes(text: str) -> Iterator[tuple[int, int]]:
    """Yields where the content of each closed box begins and ends."""
    end = 0
    while found := _BOX.search(text, end):
        start = end = found.end()
        depth = 1
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if depth == 0:
            yield start, end - 1


def _in_boxes(text: str) -> str:
    """Rewrites what is in boxes."""
    rest, parts = 0, []
    for start, end in _boxes(text):
        parts += [text[rest:start], _rewritten(text[start:end], _FOR_BOXES)]
        rest = end
    return "".join([*parts, text[rest:]])


def _rewritten(text: str, rules: Sequence[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]]) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def marked(reference: str) -> str:
    """Puts a reference into a box, because math-verify does not find unmarked LaTeX. A text that contains a box, or a
    formula between its words, stays as it is."""
    enclosed = _ENCLOSED.fullmatch(reference)
    bare = next(filter(None, enclosed.groups())) if enclosed else reference
    is_marked = bare.replace(r"\$", "").count("$") > 1 or any(mark in bare for mark in ("\\boxed", "\\(", "\\["))
    return bare if is_marked else f"\\boxed{{{_LONE_DOLLAR.sub('', bare).strip()}}}"


def choice_letter(reference: str) -> str | None:
    """Returns the letter if the reference answers a multiple-choice question: `A`, `(A)`, `\\text{(A)}`."""
    found = _LETTER.fullmatch(marked(reference))
    return found[1] if found else None


def choice_and_value(text: str) -> tuple[str, str] | None:
    """Returns letter and value of a multiple-choice answer such as `(B) 12` or `\\textbf{(B)}\\ 12`; the value may be
    empty."""
    within = _WITHIN_TEXT.fullmatch(text)
    found = _CHOICE.fullmatch(within[1] if within and not _LETTER.fullmatch(marked(text)) else text)
    return (found[1] or found[2] or found[3], (found[4] or "").strip()) if found else None


@lru_cache(1024)
def ends_in_a_variable(reference: str) -> bool:
    """Whether a reference ends in a single letter that belongs to its expression, as in `2t` or `x + t`. math-verify
    removes such a letter if a unit is called like it."""
    return _ENDS_IN_A_VARIABLE.search(readings(marked(reference))[1]) is not None
