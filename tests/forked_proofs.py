"""Runs model proofs in processes forked from the suites' fork server, which has imported torch, transformers and the
backends.

A new interpreter needs 9 s for these imports, and 20 s with Megatron; a forked process does not repeat them.
"""

from __future__ import annotations

import gc
import os
import subprocess
from pathlib import Path

from rl_transformers.proof import model_proof

run_interpreter = model_proof.run_interpreter
"""The original function, which starts a new interpreter, as in a run. Tests that must not fork restore it."""
_DEADLINE_S = 240.0


def run_forked(job_file: Path, result_file: Path) -> tuple[int, str]:
    """Does what `model_proof.run_interpreter` does, but returns no error output."""
    from rl_transformers.testing.ranks import fork_server

    process = fork_server().Process(target=_prove, args=(str(job_file), str(result_file)), daemon=True)
    process.start()
    try:
        process.join(_DEADLINE_S)
        if process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked proof", _DEADLINE_S)
        return process.exitcode, ""
    finally:
        process.kill()
        process.join()
        process.close()


def _prove(job_file: str, result_file: str) -> None:
    from rl_transformers.proof.proof_process import main

    gc.freeze()
    os.environ.update(model_proof.ALONE)
    main(job_file, result_file)
