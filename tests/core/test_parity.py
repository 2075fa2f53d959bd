"""The parity table: a suite's measurements as a page that does not depend on the order of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_transformers.testing.parity import DIRECTORY_VARIABLE, Measurement, main, page, read_measurements, write_down


def measured(mesh: str, quantity: str, difference: float, limit: float = 1e-5, **fields) -> Measurement:
    return Measurement(backend="made_up", mesh=mesh, quantity=quantity, difference=difference, limit=limit, **fields)


ROWS = [
    measured("2 ranks", "weights", 3.14e-6),
    measured("1 rank", "weights", 8e-7),
    measured("1 rank", "exported", 0.0, 0.0),
    measured("2 ranks", "half the batch", 2.345e-3, 1e-3, at_least=True),
    measured("2 ranks", "next step", 4e-6, loaded_at="1 rank"),
]


def test_cells_show_two_digits_and_the_limit():
    assert str(ROWS[0]) == "3.1e-06 ≤ 1e-05"
    assert str(ROWS[2]) == "equal"
    assert str(ROWS[3]) == "2.3e-03 ≥ 1e-03"


def test_the_page_is_the_same_in_whatever_order_tests_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pages = []
    for name, rows in {"forwards": ROWS, "backwards": ROWS[::-1]}.items():
        monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / name))
        for row in rows:
            write_down(row)
        pages.append(page(read_measurements(tmp_path / name)))
    assert pages[0] == pages[1]
    assert pages[0].endswith(
        """
## made_up

| mesh | weights | exported | half the batch |
| --- | --- | --- | --- |
| 1 rank | 8.0e-07 ≤ 1e-05 | equal |  |
| 2 ranks | 3.1e-06 ≤ 1e-05 |  | 2.3e-03 ≥ 1e-03 |

State saved by one mesh and loaded by another:

| saved by | loaded by | next step |
| --- | --- | --- |
| 2 ranks | 1 rank | 4.0e-06 ≤ 1e-05 |
"""
    )


def test_bfloat16_has_a_table_of_its_own_with_multiples_of_the_plain_error():
    rows = [
        measured("1 rank", "bf16 weights", 0.904, 1.5, unit=8.6e-2),
        measured("1 rank", "bf16 logprobs", 1.117, 1.5, unit=6.1e-3),
    ]
    text = page([*ROWS, *rows])
    assert "The limit of every cell is 1.5; the largest multiple is 1.12." in " ".join(text.split())
    assert text.endswith(
        """
| backend or engine | mesh | bf16 logprobs | bf16 weights |
| --- | --- | --- | --- |
| made_up | 1 rank | 1.12 of 6.1e-03 | 0.90 of 8.6e-02 |
"""
    )


def test_the_worst_of_several_measurements_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    for difference in (1e-7, 5e-7, 2e-7):
        write_down(measured("1 rank", "gradients", difference))
        write_down(measured("1 rank", "half the batch", difference, 1e-3, at_least=True))
    worst = {m.quantity: m.difference for m in read_measurements(tmp_path)}
    assert worst == {"gradients": 5e-7, "half the batch": 1e-7}


def test_nothing_is_written_without_the_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    write_down(ROWS[0])
    assert not list(tmp_path.iterdir())


def test_an_unknown_quantity_and_an_empty_directory_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="expected one of"):
        measured("1 rank", "colour", 0.0)
    with pytest.raises(SystemExit, match="no measurements"):
        main([str(tmp_path)])
    with pytest.raises(SystemExit, match="usage"):
        main([])
