"""Cost of running programs in the sandbox, per mechanism: start, each further test, and many programs concurrently.

    python benchmarks/sandbox.py [--programs 20] [--tests 100]

The mechanisms alternate, so that other load on the machine affects all of them. `none` measures the supervisor alone,
without protection.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time

from rl_core.errors import ConfigError
from rl_environments.sandbox import Sandbox, Test, probe_sandbox

PROGRAM = "print(int(input()) + 1)"
TEST = Test(stdin="41\n")


async def seconds_of_a_program(sandbox: Sandbox, num_tests: int) -> float:
    """Seconds to open a sandbox, run the tests and close it."""
    started = time.perf_counter()
    outcomes = await sandbox.run(PROGRAM, [TEST] * num_tests)
    assert all(outcome.stdout == "42\n" for outcome in outcomes), outcomes
    return time.perf_counter() - started


async def seconds_side_by_side(sandbox: Sandbox, num_programs: int) -> float:
    """Seconds of many one-test programs, as many concurrently as there are slots."""
    started = time.perf_counter()
    await asyncio.gather(*[sandbox.run(PROGRAM, [TEST]) for _ in range(num_programs)])
    return time.perf_counter() - started


async def found_sandboxes() -> list[Sandbox]:
    """One sandbox for each mechanism that works on this machine."""
    found = []
    for kind in ("bubblewrap", "landlock", "none"):
        started = time.perf_counter()
        try:
            found.append(await probe_sandbox(kind))
        except ConfigError as error:
            print(f"{kind}: not available: {error}")
            continue
        print(f"{kind}: probed in {time.perf_counter() - started:.2f} s")
    return found


async def main(num_programs: int, num_tests: int) -> None:
    sandboxes = await found_sandboxes()
    single: dict[str, list[float]] = {sandbox.mechanism: [] for sandbox in sandboxes}
    for _ in range(num_programs):
        for sandbox in sandboxes:
            single[sandbox.mechanism].append(await seconds_of_a_program(sandbox, 1))
    print(f"\nload {os.getloadavg()[0]:.1f}")
    print(f"{'mechanism':12} {'program':>12} {'95 %':>10} {'further test':>14} {'programs/s':>12}")
    for sandbox in sandboxes:
        times = sorted(single[sandbox.mechanism])
        median_s = statistics.median(times)
        further_s = (await seconds_of_a_program(sandbox, num_tests + 1) - median_s) / num_tests
        rate = num_programs / await seconds_side_by_side(sandbox, num_programs)
        slowest_s = times[int(0.95 * (len(times) - 1))]
        print(
            f"{sandbox.mechanism:12} {1e3 * median_s:9.0f} ms {1e3 * slowest_s:7.0f} ms {1e3 * further_s:11.1f} ms "
            f"{rate:12.1f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--tests", type=int, default=100)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.programs, arguments.tests))
