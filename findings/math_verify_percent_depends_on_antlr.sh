#!/bin/bash
# math-verify 0.9.0 (latex2sympy2-extended 1.11.0) permits the ANTLR runtimes 4.9.3, 4.11.0 and 4.13.2 and ships one
# generated parser for each. They are not the same grammar: with 4.9.3, which omegaconf (Hydra) pins, and with 4.11.0, a
# per cent sign cannot be read within LaTeX. A reference of 50\% then equals only the very same text, and `20\% \times
# 50` is read as 50, so it is right for a reference of 50. With 4.13.2 both verdicts are the other way round. Nothing is
# raised.
# Seen: "4.9.3: 50\% = 0.5 False, 20\% x 50 = 50 True" and "4.13.2: 50\% = 0.5 True, 20\% x 50 = 50 False".
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
for antlr in 4.9.3 4.11.0 4.13.2; do
  python3 -m venv "$dir/$antlr"
  "$dir/$antlr/bin/pip" install -q math-verify==0.9.0 latex2sympy2-extended==1.11.0 "antlr4-python3-runtime==$antlr"
  "$dir/$antlr/bin/python" - "$antlr" <<'PY'
import logging
import sys

from math_verify import parse, verify

logging.disable(logging.CRITICAL)
antlr = sys.argv[1]


def is_right(reference, answer):
    return verify(parse(rf"\boxed{{{reference}}}"), parse(rf"\boxed{{{answer}}}"))


half, fifty = is_right(r"50\%", "0.5"), is_right("50", r"20\% \times 50")
print(rf"{antlr}: 50\% = 0.5 {half}, 20\% x 50 = 50 {fifty}")
assert (half, fifty) == ((True, False) if antlr == "4.13.2" else (False, True))
assert is_right("50", "50.0") and not is_right("50", "51")  # other numbers are judged alike
PY
done
