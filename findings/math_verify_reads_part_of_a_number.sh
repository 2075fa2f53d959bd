#!/bin/bash
# math-verify 0.9.0 reads some usual ways to write a number as another number, and two tiny numbers as equal. Nothing is
# raised and no result is empty: a mixed number 1 1/2 is 1, thousands with LaTeX's thin space (1\,234) are 1 + 234, the
# exponent of 1e-3 is Euler's number less 3, and `x + t` loses its t as a unit, so that it equals `x + s`, both left as
# the text `x +`. verify() compares to 15 decimals, not digits, so the electron's mass equals its charge.
# Seen: "1 1/2 = 1: True", "1\,234 = 235: True", "1e-3 = 0.001: False", "x + t = x + s: True",
# "9.1 x 10^-31 = 1.6 x 10^-19: True, with numeric_precision=45: False".
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q math-verify==0.9.0 latex2sympy2-extended==1.11.0 antlr4-python3-runtime==4.13.2
"$dir/venv/bin/python" - <<'PY'
import logging

from math_verify import parse, verify

logging.disable(logging.CRITICAL)


def is_right(reference, answer, **settings):
    return verify(parse(rf"\boxed{{{reference}}}"), parse(rf"\boxed{{{answer}}}"), **settings)


CASES = [("1 1/2", "1", True), (r"1\,234", "235", True), ("1e-3", "0.001", False), ("x + t", "x + s", True)]
for reference, answer, seen in CASES:
    print(f"{reference} = {answer}: {is_right(reference, answer)}")
    assert is_right(reference, answer) is seen
mass, charge = r"9.1 \times 10^{-31}", r"1.6 \times 10^{-19}"
default, precise = is_right(mass, charge), is_right(mass, charge, numeric_precision=45)
print(f"9.1 x 10^-31 = 1.6 x 10^-19: {default}, with numeric_precision=45: {precise}")
assert default and not precise
PY
