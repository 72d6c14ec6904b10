"""Who may import whom (docs/ARCHITECTURE.md, "Arrows"): read from the sources, not from what happens to be loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = ("parkd.types", "parkd.state", "parkd.errors", "parkd.private_files", "parkd.config", "parkd.namespaces")
FOLDER_LIMIT = 26
"""Modules that lie side by side in one folder: what one can look over. More of them have rooms."""
OURS = ("parkd", "parkd_engine", "parkd_tier", "tests", "benchmarks")
"""Top-level packages of this repository. The last two are not installed: nothing that is may import them."""
HTTP = ("starlette", "uvicorn", "httpx", "h11", "fastapi")
TORCH = ("torch", "transformers", "tokenizers", "accelerate")
"""Only with the extra `torch`."""
COMPUTE = (*TORCH, "gguf")


@dataclass(frozen=True)
class Rule:
    """What modules under `part` may import of the project, and what they may not import of others."""

    part: str
    own: tuple[str, ...]
    forbidden: tuple[str, ...] = ()


RULES = (
    Rule(
        "parkd_engine",
        ("parkd_engine", "parkd.words", "parkd.model_files", "parkd.state", "parkd.errors", "parkd.private_files"),
        HTTP,
    ),
    Rule("parkd.words", ("parkd.words", "parkd.model_files", "parkd.state", "parkd.errors"), COMPUTE + HTTP),
    Rule("parkd.model_files", ("parkd.model_files", "parkd.errors", "parkd.private_files"), COMPUTE + HTTP),
    Rule("parkd.types", ("parkd.types", "parkd.state"), COMPUTE + HTTP),
    Rule("parkd.state", ("parkd.state",), COMPUTE + HTTP),
    Rule("parkd.errors", (), COMPUTE + HTTP),
    Rule("parkd.private_files", (), COMPUTE + HTTP),
    Rule("parkd.config", ("parkd.config", "parkd.identity.normalise", *SHARED), COMPUTE + HTTP),
    Rule("parkd.identity", ("parkd.identity", "parkd.engine_adapter.base", *SHARED), COMPUTE + HTTP),
    Rule("parkd.ledger", ("parkd.ledger", "parkd.types", "parkd.errors", "parkd.private_files"), COMPUTE + HTTP),
    Rule("parkd.store", ("parkd.store", *SHARED), COMPUTE + HTTP),
    Rule("parkd.portable", ("parkd.portable", "parkd.store", "parkd.identity.chain", *SHARED), COMPUTE + HTTP),
    Rule(
        "parkd.replay",
        (
            "parkd.replay",
            "parkd.store",
            "parkd.identity.chain",
            "parkd.identity.matcher",
            "parkd.lane.live_rows",
            "parkd.lane.schedule",
            "parkd.lane.start",
            *SHARED,
        ),
        COMPUTE + HTTP,
    ),
    Rule(
        "parkd.answers",
        ("parkd.answers", "parkd.identity.output_memory", "parkd.engine_adapter.base", *SHARED),
        COMPUTE + HTTP,
    ),
    Rule(
        "parkd.lane",
        (
            "parkd.lane",
            "parkd.answers",
            "parkd.identity",
            "parkd.ledger",
            "parkd.store",
            "parkd.engine_adapter.base",
            *SHARED,
        ),
        COMPUTE + HTTP,
    ),
    Rule(
        "parkd.canary",
        ("parkd.canary", "parkd.identity", "parkd.store", "parkd.engine_adapter.base", *SHARED),
        COMPUTE + HTTP,
    ),
    Rule(
        "parkd.proxy",
        (
            "parkd.proxy",
            "parkd.lane",
            "parkd.ledger",
            "parkd.answers",
            "parkd.identity",
            "parkd.store",
            "parkd.portable",
            "parkd.engine_adapter.base",
            *SHARED,
        ),
        COMPUTE,
    ),
    Rule("parkd.engine_adapter.base", ("parkd.engine_adapter.base", *SHARED), COMPUTE + HTTP),
    Rule("parkd.engine_adapter.torch_engine", ("parkd_engine", "parkd.engine_adapter", "parkd.words", *SHARED), HTTP),
    Rule(
        "parkd.engine_adapter.llama_cpp",
        ("parkd.engine_adapter", "parkd.words", "parkd.model_files", *SHARED),
        TORCH + HTTP,
    ),
    Rule("parkd.engine_adapter.http", ("parkd.engine_adapter.http", *SHARED), COMPUTE),
    Rule("parkd.engine_adapter.remote", ("parkd.engine_adapter", "parkd.words", *SHARED), COMPUTE),
    Rule("parkd.engine_adapter.llama_server", ("parkd.engine_adapter", *SHARED), COMPUTE),
    Rule("parkd.engine_adapter", ("parkd.engine_adapter", "parkd.words", *SHARED), COMPUTE + HTTP),
    Rule("parkd_tier.lmcache", ("parkd_tier", "parkd.store", "parkd.errors", "parkd.model_files"), HTTP),
    Rule("parkd_tier.sglang", ("parkd_tier", "parkd.store", "parkd.state", "parkd.errors", "parkd.model_files"), HTTP),
    Rule("parkd_tier.vllm", ("parkd_tier", "parkd.store", "parkd.state", "parkd.errors", "parkd.model_files"), HTTP),
    Rule("parkd_tier", ("parkd_tier", "parkd.store", "parkd.state", "parkd.errors", "parkd.model_files"), COMPUTE),
    Rule("parkd.cli", ("parkd", "parkd_engine")),  # the composition root
    Rule("parkd", ("parkd",), COMPUTE),
)
"""The first rule whose part holds a module is the one for it, so narrower parts stand before wider ones."""


def under(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def module_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """Every module named by an import, wherever it stands: also inside functions and under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*parents, base]) if base else ".".join(parents)
            # `from parkd import store` imports a module too, `from parkd.types import Units` a name.
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def violations(module: str, imported: set[str]) -> Iterator[str]:
    rule = next((rule for rule in RULES if under(module, rule.part)), None)
    if rule is None:
        return
    for name in sorted(imported):
        ours = any(under(name, package) for package in OURS)
        if ours and not any(under(name, part) for part in rule.own):
            yield f"{module} imports {name}, which {rule.part} may not know"
        elif any(under(name, library) for library in rule.forbidden):
            yield f"{module} imports {name}, a library {rule.part} must do without"


def test_every_arrow_points_the_right_way() -> None:
    wrong: list[str] = []
    modules = 0
    for folder, root in (("parkd_engine", ROOT / "engine"), ("parkd_tier", ROOT / "tier"), ("parkd", ROOT)):
        for path in sorted((root / folder).rglob("*.py")):
            module = module_of(path, root)
            imported = imports_of(path.read_text(), module, is_package=path.name == "__init__.py")
            wrong += violations(module, imported)
            modules += 1
    assert modules > 10, "the sources were not found"
    assert wrong == []


def circle_in(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, the first also at the end; empty if there is none."""
    modules = {
        module: {found for name in names if (found := _module_named(name, imports)) not in (None, module)}
        for module, names in imports.items()
    }
    try:
        TopologicalSorter(modules).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def _module_named(name: str, modules: Mapping[str, set[str]]) -> str | None:
    """The module that an import names, itself or one of its names."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def engines_told_apart(source: str) -> list[str]:
    """The engines' classes that `isinstance` and `issubclass` ask for."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and len(node.args) == 2]
    asked = [ast.unparse(call.args[1]) for call in calls if ast.unparse(call.func) in ("isinstance", "issubclass")]
    return [name for name in asked if "Engine" in name and not name.endswith(("Failure", "Lost"))]


def test_no_caller_tells_engines_apart_by_their_class() -> None:
    """All engines meet one protocol. Only the composition knows which one it has made."""
    callers = [
        path for path in sorted((ROOT / "parkd").rglob("*.py")) if not ({"engine_adapter", "cli"} & {*path.parts})
    ]
    assert len(callers) > 10, "the sources were not found"
    assert [(path.name, told) for path in callers if (told := engines_told_apart(path.read_text()))] == []
    assert engines_told_apart("if isinstance(engine, RemoteEngine): pass") == ["RemoteEngine"]


@pytest.mark.parametrize(
    ("folder", "root"), [("parkd", ROOT), ("parkd_engine", ROOT / "engine"), ("parkd_tier", ROOT / "tier")]
)
def test_no_modules_import_each_other_in_a_circle(folder: str, root: Path) -> None:
    imports = {
        module_of(path, root): imports_of(
            path.read_text(), module_of(path, root), is_package=path.name == "__init__.py"
        )
        for path in sorted((root / folder).rglob("*.py"))
    }
    assert len(imports) > 10, "the sources were not found"
    assert circle_in(imports) == []


def test_a_circle_is_seen_also_if_it_is_only_for_types() -> None:
    late = "if TYPE_CHECKING:\n    from parkd.proxy.app import Proxy"
    imports = {
        "parkd.proxy.app": imports_of("from parkd.proxy.endpoints import Endpoints", "parkd.proxy.app"),
        "parkd.proxy.endpoints": imports_of(late, "parkd.proxy.endpoints"),
    }
    assert set(circle_in(imports)) == set(imports)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("parkd_engine.session", "from parkd.types import Units"),
        ("parkd_engine.session", "def late():\n    import parkd.config"),
        ("parkd.store.store", "import torch.nn"),
        ("parkd.store.store", "from parkd import identity"),
        ("parkd.store.store", "from ..identity import matcher"),
        ("parkd.identity.chain", "from parkd.store.records import BlockId"),
        ("parkd.identity.chain", "from starlette.requests import Request"),
        ("parkd.replay.driver", "from parkd.lane.turn_runner import TurnRunner"),
        ("parkd.lane.turn_runner", "from parkd_engine.session import Session"),
        ("parkd.lane.turn_runner", "from parkd.engine_adapter.torch_engine.engine import TorchEngine"),
        ("parkd.lane.turn_runner", "from parkd.engine_adapter import held_text"),
        ("parkd.lane.turn_runner", "from tests.fakes.engine import FakeEngine"),
        ("parkd.cli.model", "from tests.fakes.engine import FakeEngine"),
        ("parkd_engine.session", "import tests.fakes"),
        ("parkd.engine_adapter.held_text", "import parkd_engine"),
        ("parkd.engine_adapter.held_text", "import httpx"),
        ("parkd.engine_adapter.llama_server.client", "import torch"),
        ("parkd.engine_adapter.llama_cpp.engine", "from parkd_engine.session import Session"),
        ("parkd.engine_adapter.llama_cpp.text", "def late():\n    import transformers"),
        ("parkd.words.sampling", "import torch"),
        ("parkd.demo.command", "from parkd_engine.session import Session"),
        ("parkd.types", "from parkd.errors import ParkdError"),
        ("parkd.cli.model", "import parkd_tier"),
        ("parkd_tier.tier", "import torch"),
        ("parkd_tier.vllm.manager", "from parkd.lane.disk_worker import DiskWorker"),
    ],
)
def test_a_wrong_arrow_is_seen(module: str, source: str) -> None:
    assert list(violations(module, imports_of(source, module)))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("parkd.store.store", "from .records import BlockId\nfrom parkd.errors import ParkdError\nimport numpy"),
        ("parkd.engine_adapter.torch_engine.engine", "import torch\nfrom parkd_engine.session import Session"),
        ("parkd.cli", "from parkd.store.store import ConversationStore\nimport parkd_engine"),
    ],
)
def test_a_right_arrow_passes(module: str, source: str) -> None:
    assert not list(violations(module, imports_of(source, module)))


@pytest.mark.parametrize("folder", ["parkd", "engine", "tests"])
def test_a_folder_has_what_one_can_look_over(folder: str) -> None:
    counts: dict[Path, int] = {}
    for path in (ROOT / folder).rglob("*.py"):
        counts[path.parent] = counts.get(path.parent, 0) + 1
    assert counts, "the sources were not found"
    assert {str(place.relative_to(ROOT)): count for place, count in counts.items() if count > FOLDER_LIMIT} == {}
