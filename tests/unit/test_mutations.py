"""The script that breaks conditions on purpose breaks every one, and sees which of them no test notices."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from tests.mutants.mutations import mutants_of

SOURCE = textwrap.dedent(
    """
    def smaller(left: "int | None", right: int) -> bool:
        assert right > 0
        if left is not None and not left >= right:
            return True
        return False

    class Sieve:
        def kept(self, numbers: list[int]) -> list[int]:
            return [number for number in numbers if number]
    """
)


def test_every_condition_is_broken_in_every_way() -> None:
    found = [(each.line, each.function, each.before, each.after) for each in mutants_of("a.py", SOURCE)]
    whole = "left is not None and (not left >= right)"
    assert sorted(found) == sorted(
        [
            (4, "smaller", whole, "True"),
            (4, "smaller", whole, "False"),
            (4, "smaller", whole, "left is not None or not left >= right"),
            (4, "smaller", whole, "not left >= right"),
            (4, "smaller", whole, "left is not None"),
            (4, "smaller", "left is not None", "left is None"),
            (4, "smaller", "not left >= right", "left >= right"),
            (4, "smaller", "left >= right", "left < right"),
            (4, "smaller", "left >= right", "left > right"),
            (10, "Sieve.kept", "number", "True"),
            (10, "Sieve.kept", "number", "False"),
            (10, "Sieve.kept", "number", "not number"),
        ]
    )


def test_each_tree_has_its_one_change() -> None:
    for mutant in mutants_of("a.py", SOURCE):
        names: dict[str, object] = {}
        exec(compile(mutant.tree(SOURCE), "a.py", "exec"), names)
        if mutant.after == "left > right":
            assert names["smaller"](3, 3) is True  # type: ignore[operator]
        if mutant.after == "not number":
            assert names["Sieve"]().kept([0, 1]) == [0]  # type: ignore[operator]
    assert not any(mutant.before == "right > 0" for mutant in mutants_of("a.py", SOURCE)), "assertions are left alone"


def test_a_mutant_is_killed_by_a_test_that_runs_it_and_survives_one_that_asserts_nothing(tmp_path: Path) -> None:
    (tmp_path / "under_test.py").write_text(SOURCE)
    (tmp_path / "test_good.py").write_text(
        "from under_test import smaller\n\n\ndef test_it():\n    assert not smaller(3, 3)\n"
    )
    (tmp_path / "test_idle.py").write_text("from under_test import smaller\n\n\ndef test_it():\n    smaller(3, 3)\n")
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from tests.mutants import children
        from tests.mutants.mutations import mutants_of

        def work(trials):
            path = Path("under_test.py").resolve()
            source = path.read_text()
            lines, seconds = trials.watch([path], 60.0)
            ran = {test for test, met in lines.items() if [str(path), 4] in met}
            assert ran == {"test_good.py::test_it", "test_idle.py::test_it"}, lines
            assert set(seconds) == ran
            [mutant] = [m for m in mutants_of("a.py", source) if m.after == "left > right"]
            for test in sorted(ran):
                print(trials.outcome(mutant, source, path, [test], 60.0))

        children.with_tests(["test_good.py", "test_idle.py"], work)
        """
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{root}:{tmp_path}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    outcomes = [line for line in ran.stdout.splitlines() if line.startswith("(")]
    assert outcomes == ["(True, 'test_good.py::test_it')", "(False, '')"], ran.stderr
    assert (tmp_path / "under_test.py").read_text() == SOURCE, "nothing is written to the tree"
