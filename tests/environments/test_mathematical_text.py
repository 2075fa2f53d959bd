"""Verdicts of the environment `mathematics` on every notation of the public data sets, with each parser that
math-verify permits: a right answer earns 1, a wrong one 0, and an unreadable reference is named."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from rl_environments.mathematical_text import marked, positional, readings
from tests.installing import find_links, run, uv
from tests.workspace.imports import ROOT

# fmt: off
VERDICTS = [  # reference, right answers, wrong answers
    ("50%", [r"\boxed{50\%}", r"\boxed{50%}", r"\boxed{0.5}", r"\boxed{\frac12}", r"\boxed{50}", "The answer is 50%.",
             r"The answer is 50\%.", r"\boxed{50\text{ percent}}", r"\boxed{50\text{\%}}"],
            [r"\boxed{5\%}", r"\boxed{5000}", r"\boxed{0.05}", r"\boxed{-50\%}"]),
    (r"50\%", [r"$50\%$", r"\boxed{\frac{1}{2}}"], [r"\boxed{51\%}"]),
    (r"\boxed{50\%}", [r"\boxed{50\%}"], [r"\boxed{500\%}"]),
    (r"-5\%", [r"\boxed{-5\%}", r"\boxed{-0.05}"], [r"\boxed{5\%}"]),
    (r"33\frac{1}{3}\%", [r"\boxed{\frac13}", r"\boxed{33\frac13\%}"], [r"\boxed{\frac13\%}", r"\boxed{\frac34}"]),
    ("0.5", [r"\boxed{50\%}"], [r"\boxed{5\%}"]),
    ("50", [r"\boxed{50\%}"], [r"$20\% \times 50$", r"\boxed{20\% \times 50}"]),
    ("10", [r"\boxed{20\% \times 50}"], [r"\boxed{20\%}"]),
    ("60", [r"50\% of 120 is 60.", r"Answer: 60, which is 50\% of 120", "50 percent of 120 is 60."],
           [r"60 is 50\% of \boxed{120}"]),
    (r"\$5", [r"\boxed{5}", r"\boxed{\$5}", "It costs $5."], [r"\boxed{\$6}"]),
    ("$5", [r"\boxed{5}"], [r"\boxed{4}"]),
    (r"\text{\$}5", [r"\boxed{5.00}"], [r"\boxed{50}"]),
    ("5 dollars", [r"\boxed{5}", r"\boxed{5\text{ dollars}}"], [r"\boxed{6\text{ dollars}}"]),
    ("5€", [r"\boxed{5}"], [r"\boxed{7}"]),
    (r"\$1,234.56", [r"\boxed{1234.56}"], [r"\boxed{1234}"]),
    ("1,234", [r"\boxed{1234}", r"\boxed{1\,234}", r"\boxed{1{,}234}", r"\boxed{1,\!234}", r"\boxed{1 234}"],
              [r"\boxed{235}", r"\boxed{1}", r"\boxed{\{1, 234\}}"]),
    (r"1\,234", [r"\boxed{1234}"], [r"\boxed{235}"]),
    ("1 000", [r"\boxed{1000}"], [r"\boxed{0}", r"\boxed{1}"]),
    ("033", [r"\boxed{33}", r"\boxed{033}", "The answer is 33."], [r"\boxed{3}"]),
    ("1 1/2", [r"\boxed{\frac32}", r"\boxed{1\frac12}", "The answer is 1 1/2.", r"\boxed{1.5}"], [r"\boxed{1}"]),
    (r"1\frac{1}{2}", [r"\boxed{1.5}", r"\boxed{1 1/2}"], [r"\boxed{\frac12}"]),
    (r"-\dfrac{1}{2}", [r"\boxed{-0.5}"], [r"\boxed{0.5}"]),
    (r"\frac12", [r"\boxed{1/2}", r"\boxed{½}"], [r"\boxed{12}"]),
    ("3½", [r"\boxed{3.5}"], [r"\boxed{1.5}"]),
    (r"0.\overline{3}", [r"\boxed{\frac13}", r"\boxed{0.\overline{3}}"], [r"\boxed{0.3}"]),
    (r"0.1\overline{6}", [r"\boxed{\frac16}"], [r"\boxed{0.16}"]),
    ("1e-3", [r"\boxed{0.001}", r"\boxed{1e-3}", r"\boxed{10^{-3}}", "The answer is 1e-3."], [r"\boxed{0.002}"]),
    ("1.5e3", [r"\boxed{1500}"], [r"\boxed{150}"]),
    ("2e-3", [r"\boxed{-3+2e}", r"\boxed{0.002}"], [r"\boxed{2}"]),
    ("0.00001", [r"\boxed{10^{-5}}", r"\boxed{\frac{1}{100000}}", r"\boxed{0.00001}"],
                [r"\boxed{0.00002}", r"\boxed{0.0000101}", r"\boxed{0}"]),
    ("10000000000000000000000", [r"\boxed{10^{22}}"], [r"\boxed{10^{22}+1}"]),
    ("9007199254740993", [r"\boxed{9007199254740993}"], [r"\boxed{9007199254740992}"]),
    (r"1.6\times 10^{-19}", [r"\boxed{1.6\times 10^{-19}}", r"\boxed{1.6e-19}"], [r"\boxed{9.1\times 10^{-31}}"]),
    (r"\frac{1}{2^{99}}", [r"\boxed{2^{-99}}"], [r"\boxed{\frac{1}{2^{98}}}"]),
    ("0.333333", [r"\boxed{\frac13}"], [r"\boxed{\frac34}"]),
    ("-0.0", [r"\boxed{0}"], [r"\boxed{1}"]),
    ("–5", [r"\boxed{-5}"], [r"\boxed{5}"]),
    ("５", [r"\boxed{5}"], [r"\boxed{4}"]),
    ("√2", [r"\boxed{\sqrt{2}}"], [r"\boxed{2}"]),
    ("5.", [r"\boxed{5}"], [r"\boxed{6}"]),
    ("x + t", [r"\boxed{t + x}"], [r"\boxed{x + s}", r"\boxed{x}"]),
    ("2t", [r"\boxed{2t}"], [r"\boxed{2}", r"\boxed{2s}"]),
    ("2 cm", [r"\boxed{2}", r"\boxed{2\text{ cm}}"], [r"\boxed{3\text{ cm}}"]),
    ("2", [r"\boxed{2 cm}", r"\boxed{2m}"], [r"\boxed{2\frac12 cm}"]),
    ("$x^2+2x+1$", ["$(x+1)^2$", r"\boxed{(x+1)^2}"], [r"\boxed{(x-1)^2}"]),
    ("pi/4", [r"\boxed{\frac{\pi}{4}}", r"\boxed{pi/4}"], [r"\boxed{\frac{pi}{3}}", r"\boxed{\frac{ip}{4}}"]),
    ("2π", [r"\boxed{2\pi}", r"\boxed{2pi}"], [r"\boxed{2}"]),
    ("½π", [r"\boxed{\frac{\pi}{2}}"], [r"\boxed{\frac{1}{2\pi}}"]),
    ("cos(x)", [r"\boxed{\cos x}", r"\boxed{\cos(x)}"], [r"\boxed{\sin x}", r"\boxed{xocs}"]),
    ("ln 2", [r"\boxed{\ln 2}", r"\boxed{\ln(2)}"], [r"\boxed{\ln 3}"]),
    ("1/2 x", [r"\boxed{\frac{x}{2}}"], [r"\boxed{\frac{1}{2x}}"]),
    (r"\langle 1,2\rangle", [r"\boxed{(1,2)}", r"\boxed{\langle 1, 2 \rangle}"], [r"\boxed{1.2}"]),
    ("1.234.567", [r"\boxed{1234567}"], [r"\boxed{1.234}"]),
    ("30°", [r"\boxed{30}", r"\boxed{30^\circ}"], [r"\boxed{60}"]),
    ("x²", ["$x^2$"], ["$x^3$"]),
    ("5 km/h", [r"\boxed{5}", r"\boxed{5\text{ km/h}}"], [r"\boxed{6\text{ km/h}}"]),
    ("9.8 m/s^2", [r"\boxed{9.8}", r"\boxed{9.8\text{ m/s}^2}"], [r"\boxed{8.9}"]),
    ("5 marbles", [r"\boxed{5}"], [r"\boxed{4 marbles}"]),
    ("(-∞, 3)", [r"\boxed{(-\infty, 3)}"], [r"\boxed{(-\infty, 3]}"]),
    ("x=5", [r"\boxed{5}", r"\boxed{x=5}"], [r"\boxed{6}", r"\boxed{x=6}"]),
    ("5 or 6", [r"\boxed{5\text{ or }6}", r"\boxed{5, 6}"], [r"\boxed{5}", r"\boxed{5, 7}"]),
    (r"(-\infty,1)\cup(1,\infty)", [r"\boxed{(-\infty,1)\cup(1,\infty)}"], [r"\boxed{(-\infty,\infty)}"]),
    ("(1, 2]", [r"\boxed{(1,2]}"], [r"\boxed{[1,2]}", r"\boxed{(1,2)}"]),
    ("(1,2)", [r"\boxed{(1, 2)}"], [r"\boxed{(2,1)}"]),
    (r"\{1,2\}", [r"\boxed{\{2,1\}}"], [r"\boxed{\{1,3\}}"]),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", [r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"],
                                          [r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}"]),
    (r"30^\circ", [r"\boxed{30}", r"\boxed{30^{\circ}}"], [r"\boxed{60^\circ}"]),
    (r"2^{10}", [r"\boxed{1024}"], [r"\boxed{20}"]),
    ("B", ["The answer is B.", "Answer: **B**", r"\boxed{(B)}"], ["The answer is C.", "Is it B? I choose C.", "b"]),
    (r"\text{(A)}", ["The answer is A", r"\boxed{A}", r"\boxed{\text{A}}"], [r"\boxed{B}"]),
    (r"\text{Monday}", [r"\boxed{Monday}", r"\boxed{\text{monday}}"], [r"\boxed{\text{Sunday}}"]),
    ("No solution", [r"\boxed{\text{no solution}}"], [r"\boxed{0}"]),
    (r"\textbf{(D)}\ 12", [r"\boxed{12}", r"\boxed{D}", r"\boxed{\textbf{(D)}\ 12}"],
                            [r"\boxed{13}", r"\boxed{(C) 13}"]),
    ("B", [r"\boxed{(B) 12}", r"\boxed{\text{(B) }12}", r"\boxed{B. 12}", r"\boxed{B.}",
           r"\boxed{\text{(B) Friday}}", r"\fbox{B}"],
          [r"\boxed{C) 12}", r"\boxed{12}"]),
    ("A: 3, B: 4", [r"\boxed{A: 3, B: 4}"], [r"\boxed{A}", r"\boxed{A: 3}", r"\boxed{A: 3, B: 5}"]),
    ("(A)+1", [r"\boxed{A+1}"], [r"\boxed{A}", r"\boxed{1}"]),
    ("infinity", [r"\boxed{\infty}", r"\boxed{infinity}"], [r"\boxed{-\infty}", r"\boxed{0}"]),
    ("12:00", [r"\boxed{12:00}", r"\boxed{\text{12:00}}"], [r"\boxed{11:00}", r"\boxed{12}"]),
    ("9:00 am", [r"\boxed{9:00\text{ a.m.}}", r"\boxed{9:00 AM}"], [r"\boxed{9:00 pm}", r"\boxed{10:00 am}"]),
    (r"5\text{ ft }6\text{ in}", [r"\boxed{5 ft 6 in}"], [r"\boxed{5 ft 7 in}", r"\boxed{5}"]),
    ("1 hour 30 minutes", [r"\boxed{\text{1 hour 30 minutes}}", r"\boxed{1\text{ hour and }30\text{ minutes}}"],
                          [r"\boxed{1 hour 20 minutes}", r"\boxed{1}"]),
    (r"5~\mathrm{cm}", [r"\boxed{5}", r"\boxed{5~cm}"], [r"\boxed{6~cm}"]),
    ("5 cm²", [r"\boxed{5}", r"\boxed{5\text{ cm}^2}"], [r"\boxed{25}"]),
    ("20¢", [r"\boxed{20}"], [r"\boxed{21}"]),
    (r"77^\circ F", [r"\boxed{77}", r"\boxed{77^{\circ}\text{F}}"], [r"\boxed{78}"]),
    ("b < a < c", [r"\boxed{b<a<c}"], [r"\boxed{a<b<c}", r"\boxed{b<a}"]),
    (r"\left\{x \mid -1<x<2\right\}", [r"\boxed{(-1,2)}", r"\boxed{\{x | -1<x<2\}}"],
                                     [r"\boxed{\{x \mid -1<x<3\}}", r"\boxed{-1}"]),
    (r"\{x \mid x>0\}", [r"\boxed{(0,\infty)}", r"\boxed{x>0}"], [r"\boxed{x>1}", r"\boxed{x \ge 0}"]),
    (r"\{(x,y) \mid x+y=1\}", [r"\boxed{\{(x,y) | x+y=1\}}"],
                               [r"\boxed{\{(x,y) | x+y=2\}}"]),
    (r"x \leq 1 \text{ or } x>3", [r"\boxed{(-\infty,1]\cup(3,\infty)}", r"\boxed{x>3 \text{ or } x \le 1}"],
                                  [r"\boxed{(-\infty,1)\cup(3,\infty)}", r"\boxed{(1,3)}"]),
    ("(0,3]", [r"\boxed{0 < x \le 3}", r"\boxed{\{x \mid 0<x\leq 3\}}"], [r"\boxed{0<x<3}", r"\boxed{x>0}"]),
    (r"[2,\infty)", [r"\boxed{x \geq 2}"], [r"\boxed{x > 2}", r"\boxed{2x \ge 4}", r"\boxed{x-2 \ge 0}"]),
    (r"k\pi, k\in \mathbb{Z}", [r"\boxed{k\pi}", r"\boxed{k\pi\ (k \in \mathbf{Z})}"], [r"\boxed{2k\pi, k\in Z}"]),
    (r"0.1\dot{6}", [r"\boxed{\frac16}"], [r"\boxed{0.16}"]),
    (r"6.02 \times 10^{23}", [r"\boxed{6.02e23}", r"\boxed{6.02 \cdot 10^{23}}"], [r"\boxed{6.02\times 10^{22}}"]),
    ("x**2", [r"\boxed{x^2}"], [r"\boxed{2x}"]),
    (r"\varnothing", [r"\boxed{\emptyset}"], [r"\boxed{0}"]),
    ("north", [r"\boxed{\text{North}}"], [r"\boxed{south}"]),
    ("true", [r"\boxed{True}", r"\boxed{\text{true}}"], [r"\boxed{false}"]),
    ("listen", [r"\boxed{listen}"], [r"\boxed{silent}"]),
    (r"\text{June 20}", [r"\boxed{June 20}"], [r"\boxed{June 21}"]),
    ("ab-1", [r"\boxed{ba-1}"], [r"\boxed{ab+1}"]),
    (r"The sum is $3+4$, so the answer is \boxed{7}.", [r"\boxed{7}"], [r"\boxed{3}"]),
]
UNREADABLE = {
    "": "as an expression", r"\boxed{}": "as an expression", r"\frac{1}{": "as an expression",
    "]0,1[": "as an expression", r"\frac{1}{0}": "its value is", "5:0": "its value is",
    r"\{n^2 \mid n \in \mathbb{N}\}": "only a part", r"\exists x \in \mathbb{R}, x^2 < 0": "only a part",
}
LIMITS = [  # Wrong answers that earn 1: docs/environments.md names them
    ("0.25", r"\boxed{0.2500004}"), (r"\{10^{-20}, 1\}", r"\boxed{\{10^{-21}, 1\}}"), ("3:30", r"\boxed{1:10}"),
    ("1011_2", r"\boxed{1011_3}"), (r"\frac{dy}{dx}=2x", r"\boxed{\frac{dy}{dx}=3x}"),
    ("x+y=1", r"\boxed{1}"), ("(1,2)", r"\boxed{\{1,2\}}"), ("2 hours", r"\boxed{2\text{ minutes}}"),
]
# fmt: on


def notations(value: Fraction) -> list[str]:
    """Ways to write a number, which is computed with here, not read."""
    sign, size = "-" if value < 0 else "", abs(value)
    whole, rest = divmod(size.numerator, size.denominator)
    if not rest:
        digits = f"{whole:,}"
        thin, braced = digits.replace(",", r"\,"), digits.replace(",", "{,}")
        return [sign + each for each in (str(whole), digits, thin, braced, rf"\${digits}", f"{whole}.0", f"{whole} cm")]
    top, bottom = size.numerator, size.denominator
    forms = [rf"\frac{{{top}}}{{{bottom}}}", rf"\dfrac{{{top}}}{{{bottom}}}", f"{top}/{bottom}"]
    if whole:
        forms += [rf"{whole}\frac{{{rest}}}{{{bottom}}}", f"{whole} {rest}/{bottom}"]
    if 10**6 % bottom == 0:
        decimal = format(Decimal(top) / bottom, "f")
        exponent = f"{Decimal(top) / bottom * 1000:f}e-3"
        per_cent = format(Decimal(top) / bottom * 100, "f")
        forms += [decimal, exponent, rf"{per_cent}\%", f"{per_cent}%", f"{per_cent} percent"]
    return [sign + form for form in forms]


def random_pairs(count: int = 150) -> dict[tuple[str, str], bool]:
    """Pairs of a reference and a response, and whether they are equal; one in three is not."""
    choices, pairs = random.Random(0), {}
    while len(pairs) < count:
        bottom = choices.choice([1, 1, 2, 3, 4, 5, 8, 7, 20])
        value = choices.choice([1, -1]) * Fraction(choices.randint(1, 30_000), bottom)
        is_right = choices.random() < 2 / 3
        other = value if is_right else value + choices.choice([1, Fraction(1, bottom)])
        pairs[choices.choice(notations(value)), rf"\boxed{{{choices.choice(notations(other))}}}"] = is_right
    return pairs


SCRIPT = """
import json, logging, sys
import math_verify
from importlib.metadata import version
from rl_environments.judge_process import Grader
from rl_environments.mathematics import reference_answers
logging.disable(logging.CRITICAL)
grader, asked = Grader(math_verify), json.load(sys.stdin)

def answers(reference):
    return reference_answers({"answer": reference}) if reference else [""]

def problem(reference):
    return next(filter(None, map(grader.problem, answers(reference))), None)

def is_right(reference, response):
    return grader.verdict(response, answers(reference))["is_right"]

plain = math_verify.verify(*(math_verify.parse(r"\\boxed{50\\%}", parsing_timeout=None),
                             math_verify.parse(r"\\boxed{0.5}", parsing_timeout=None)), timeout_seconds=None)
print(json.dumps({
    "antlr": version("antlr4-python3-runtime"), "plain": plain,
    "verdicts": [is_right(*pair) for pair in asked["pairs"]],
    "problems": list(map(problem, asked["references"])),
}))
"""


@pytest.fixture(scope="module", params=["4.9.3", "4.13.2", pytest.param("4.11.0", marks=pytest.mark.soak)])
def judged(request, tmp_path_factory):
    """What the grader says with a version of ANTLR's runtime, which is installed for it."""
    folder = tmp_path_factory.mktemp("antlr")
    install = [uv(), "--no-config", "pip", "install", "--quiet", "--no-deps", f"--python={sys.executable}"]
    runtime = f"antlr4-python3-runtime=={request.param}"
    run([*install, *find_links(), f"--target={folder}", runtime], dict(os.environ), folder)
    pairs = [(case[0], response) for case in VERDICTS for response in (*case[1], *case[2])] + LIMITS
    pairs += [pair for pair in random_pairs() if pair not in pairs]
    references = [*(case[0] for case in VERDICTS), *UNREADABLE]
    path = os.pathsep.join([str(folder), str(ROOT / "packages" / "rl-environments" / "src")])
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=json.dumps({"pairs": pairs, "references": references}),
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    said = json.loads(result.stdout)
    assert said["antlr"] == request.param
    return {
        "verdicts": dict(zip(pairs, said["verdicts"], strict=True)),
        "problems": dict(zip(references, said["problems"], strict=True)),
        "plain": said["plain"],
        "antlr": request.param,
    }


def test_every_notation_of_the_public_data_is_judged_alike_by_both_parsers(judged):
    expected = {(case[0], right): True for case in VERDICTS for right in case[1]}
    expected |= {(case[0], wrong): False for case in VERDICTS for wrong in case[2]}
    said = {pair: judged["verdicts"][pair] for pair in expected}
    assert {pair: verdict for pair, verdict in said.items() if verdict != expected[pair]} == {}


def test_random_numbers_in_random_notations_are_equal_only_if_their_values_are(judged):
    expected = random_pairs()
    wrong = {pair: verdict for pair, verdict in expected.items() if judged["verdicts"][pair] != verdict}
    assert (wrong, 30 < sum(expected.values()) < 120) == ({}, True)


def test_without_rewriting_the_two_parsers_disagree_about_fifty_per_cent(judged):
    """A negative control: it shows that both runtimes were really used."""
    assert judged["plain"] is (judged["antlr"] == "4.13.2")


def test_a_reference_that_no_answer_could_match_is_named(judged):
    problems = judged["problems"]
    assert {case[0]: problems[case[0]] for case in VERDICTS if problems[case[0]] is not None} == {}
    for reference, problem in UNREADABLE.items():
        assert problem in (problems[reference] or "no problem"), reference


def test_the_known_limits_of_math_verify_are_the_documented_ones(judged):
    page = (Path(ROOT) / "docs" / "environments.md").read_text()
    for reference, response in LIMITS:
        assert judged["verdicts"][reference, response] is True, (reference, response)
        assert f"`{reference}`" in page, reference


def test_numbers_of_json_keep_their_digits():
    given = [json.loads(text) for text in ("0.00001", "0.000025", "1e16", "1e22", "-0.0", "9007199254740993", "3")]
    expected = ["0.00001", "0.000025", "10000000000000000", "10000000000000000000000", "-0.0", "9007199254740993", "3"]
    assert [positional(number) for number in given] == expected


@pytest.mark.timeout(60)
def test_text_without_a_second_reading_is_read_once_and_long_text_in_no_time():
    for text in ("So $x^2 + 1$ is 3,456.7 at most.", r"\boxed{\frac{1}{2}}", "1/2 of 10^3"):
        assert readings(text) == (text, text)
    assert marked("$x$") == marked(r"\(x\)") == marked("x") == r"\boxed{x}"
    for text in ("1" * 50_000, "1 " * 25_000, "1," * 25_000, " " * 50_000, "1/" * 25_000, "$" * 50_000, ".1" * 25_000):
        readings(text)
    for text in (
        "," * 25_000,
        " " * 25_000,
        r"\;" * 12_000,
        "x<1" * 9_000,
        "1 ft " * 5_000,
        r"\{x|" * 6_000,
        "ab " * 9_000,
        r"\quad " * 8_000,
    ):
        readings(rf"\boxed{{{text}}}")
