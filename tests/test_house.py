"""The structure of psctl/: imports go down, packages of a layer import none of each other, libraries have places."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PSCTL = Path(__file__).resolve().parent.parent / "psctl"

LAYERS = (
    ("errors", "units", "types", "clock", "grouping", "message_costs", "orders", "permits"),
    # Pure: no socket, file, process or sleep.
    ("spec", "topology", "schedule", "ps", "job", "transport.protocol"),
    ("coordinator.streams", "coordinator.policies"),
    ("topology.readers", "topology.algorithms", "topology.network", "schedule.algorithms",
     "ps.compression", "ps.replication", "ps.tables", "coordinator.state"),
    ("topology.host", "ps.dense", "ps.tables.client", "ps.tables.server"),
    ("ps.dense.client", "ps.dense.server", "plan.simulation"),
    ("plan",),
    # Edges: sockets, shells and disks.
    ("transport", "remote", "checkpoint"),
    # Processes of a job, from what they share to what each of them is.
    ("process", "train_state"),
    ("client", "collectives"),
    ("sync", "kv"),
    ("sparse",),
    ("agent", "coordinator", "server", "worker", "reader", "export"),
    # The user's machine.
    ("launch.remote_programs",),
    ("launch",),
    ("launch.hosts",),
    ("launch.measure", "launch.checkpoints", "launch.files"),
    ("launch.placement",),
    ("launch.setup",),
    ("launch.jobs",),
    ("launch.bench",),
    ("", "nn", "callbacks"),
    ("view",),
    ("page", "view.pictures"),
    ("cli.shared",),
    ("cli.commands",),
    ("cli",),
    ("__main__",),
)  # fmt: skip
"""Packages from the lowest layer up: a package imports those of lower layers only. The lowest layer holds modules."""

LEVEL = {package: level for level, layer in enumerate(LAYERS) for package in layer}

IMPORTERS = {
    "yaml": ("spec/",), "rich": ("view/",), "typer": ("cli/",), "click": ("cli/",),
    "paramiko": ("remote/ssh",),
    "torch": ("ps/", "client/", "collectives/", "kv/", "process/", "server/", "sparse/", "sync/",
              "train_state/", "worker/", "reader/", "agent/", "callbacks/"),
    "numpy": ("ps/", "client/", "collectives/", "kv/", "process/", "server/", "sparse/", "sync/", "train_state/",
              "worker/", "reader/"),
    "tensorboard": ("export/tensorboard_export",), "prometheus_client": ("export/prometheus_export",),
    "safetensors": ("train_state/start_values",), "transformers": ("callbacks/hugging_face",),
    "lightning": ("callbacks/lightning",),
    "mlflow": ("export/mlflow_export",), "pyarrow": ("kv/parquet_file",), "wandb": ("export/wandb_export",),
    "fsspec": ("checkpoint/", "launch/remote_programs/url_data"),
    "cryptography": ("transport/protocol/",), "ssl": ("transport/",),
    "socket": ("transport/", "process/", "agent/", "client/", "collectives/", "coordinator/", "server/", "worker/",
               "launch/", "remote/"),
    "subprocess": ("remote/", "process/", "agent/", "launch/", "worker/"),
    "psutil": ("process/", "agent/", "coordinator/", "launch/"), "msgspec": ("",),
}  # fmt: skip

TORCHLESS = (
    "psctl.agent.main", "psctl.coordinator.main", "psctl.agent.control_client", "psctl.process.bootstrap",
    "psctl.launch.jobs.submit", "psctl.launch.jobs.event_stream", "psctl.cli.app", "psctl",
)  # fmt: skip


PATHS = [
    path for path in sorted(each.relative_to(PSCTL).as_posix() for each in PSCTL.rglob("*.py"))
    if not path.startswith("_templates")
]  # fmt: skip


@functools.cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((PSCTL / path).read_text())


@functools.cache
def nodes_of(path: str) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def package_of(path: str) -> str:
    """Return the dotted package of a module's file, below psctl; a module of psctl itself stands for itself."""
    folder, _, name = path.rpartition("/")
    return folder.replace("/", ".") if folder else name.removesuffix(".py").replace("__init__", "")


def package_named(name: str) -> str:
    """Return the dotted package that an imported name of psctl belongs to."""
    parts = name.split(".")[1:]
    while parts and not (PSCTL / "/".join(parts) / "__init__.py").exists():
        if len(parts) == 1 and (PSCTL / f"{parts[0]}.py").exists():
            break
        parts.pop()
    return ".".join(parts)


@functools.cache
def imports(path: str) -> list[tuple[int, str, bool]]:
    """Every import as (line, dotted name, only for types)."""
    typing_only = {
        id(inner)
        for node in nodes_of(path)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    rows = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            rows += [(node.lineno, alias.name, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            inside = (node.module or "").split(".")[0] == "psctl"
            names = [f"{node.module}.{alias.name}" for alias in node.names] if inside else [node.module or ""]
            rows += [(node.lineno, name, id(node) in typing_only) for name in names]
    return rows


def test_imports_only_go_down_and_not_between_packages_of_a_layer() -> None:
    assert not [path for path in PATHS if package_of(path) not in LEVEL], "packages without a layer"
    for path in PATHS:
        package = package_of(path)
        for line, name, _ in imports(path):
            if name.split(".")[0] != "psctl":
                continue
            other = package_named(name)
            if other == package or name in ("psctl", "psctl.__version__"):
                continue  # the package itself loads nothing before one of its names is used
            assert other in LEVEL, f"{path}:{line} imports {name}, which has no layer"
            below = LEVEL[other] < LEVEL[package] or (LEVEL[other] == LEVEL[package] == 0)
            lazy = package == "" and other in ("worker", "nn")
            assert below or lazy, f"{path}:{line} imports {name}: {other} is not below {package}"


def test_each_outside_library_is_imported_where_it_may_be() -> None:
    for path in PATHS:
        for line, name, _ in imports(path):
            library = name.split(".")[0]
            if library == "psctl" or (library in sys.stdlib_module_names and library not in IMPORTERS):
                continue
            assert library in IMPORTERS, f"{path}:{line}: {library} may be imported nowhere yet"
            allowed = IMPORTERS[library]
            assert path.startswith(allowed), f"{path}:{line}: {library} may only be imported in {allowed}"


@pytest.mark.parametrize("module", TORCHLESS)
def test_what_steers_a_job_never_loads_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=PSCTL.parent).returncode == 0


def packages() -> list[Path]:
    """Return the folders of psctl/ that are packages, without the templates that travel with it."""
    return [path.parent for path in sorted(PSCTL.rglob("__init__.py")) if "_templates" not in path.parts]


@pytest.mark.parametrize("folder", packages()[1:], ids=lambda folder: str(folder.relative_to(PSCTL)))
def test_a_package_lists_its_modules_and_holds_nothing_else(folder: Path) -> None:
    tree = ast.parse((folder / "__init__.py").read_text())
    assert [type(node) for node in tree.body] == [ast.Expr], f"{folder}: a docstring, so that no import loads another"
    lines = (ast.get_docstring(tree) or "").splitlines()
    listed = {line.split(":")[0].strip() for line in lines[1:] if ":" in line}
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    inner = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert lines, f"{folder}: no docstring"
    assert listed >= modules | inner, f"{folder}: not listed: {sorted((modules | inner) - listed)}"
    assert modules | inner >= listed, f"{folder}: not there: {sorted(listed - modules - inner)}"


ONE_OF_A_KIND = {"cli/commands": "one verb a module", "coordinator/state": "one topic of a job a module"}
"""Packages that may have more than MODULES modules, and why."""

MODULES = 25


def test_packages_stay_small() -> None:
    for folder in packages():
        count = len(list(folder.glob("*.py"))) - 1
        assert count <= MODULES or str(folder.relative_to(PSCTL)) in ONE_OF_A_KIND, f"{folder}: {count} modules"


SAME_CLASS_NAMES: dict[str, str] = {}
"""Class names that may be defined more than once, and why."""


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for path in PATHS:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path)
    twice = {name: found for name, found in places.items() if len(found) > 1 and name not in SAME_CLASS_NAMES}
    assert not twice, "\n".join(f"{name}: {', '.join(found)}" for name, found in sorted(twice.items()))


def test_files_and_functions_stay_small() -> None:
    """At most 800 lines a file and 60 a function; longer ones say why in a comment `long:`."""
    rows = []
    for path in sorted(PSCTL.rglob("*.py")):
        text = path.read_text()
        lines = text.splitlines()
        if len(lines) > 800 and "# long:" not in text:
            rows.append(f"{path.relative_to(PSCTL)}: {len(lines)} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (size := (node.end_lineno or 0) - node.lineno + 1) > 60:
                body = "\n".join(lines[node.lineno - 2 : node.end_lineno])
                if "# long:" not in body:
                    rows.append(f"{path.relative_to(PSCTL)}:{node.lineno} {node.name}: {size} lines")
    assert not rows, "\n".join(rows)


def test_modules_open_with_a_sentence() -> None:
    for path in PATHS:
        if path.endswith("__init__.py") and "/" in path:
            continue
        first = (ast.get_docstring(tree_of(path)) or "").split("\n\n")[0]
        assert first, f"{path}: no docstring"


def test_no_error_is_swallowed_and_no_stub_is_left() -> None:
    for path in PATHS:
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler) and len(node.body) == 1 and isinstance(node.body[0], ast.Pass):
                caught = ast.unparse(node.type) if node.type else ""
                assert caught not in ("", "Exception", "BaseException"), f"{path}:{node.lineno}: swallows everything"
            if isinstance(node, ast.Raise) and node.exc is not None:
                assert "NotImplementedError" not in ast.unparse(node.exc), f"{path}:{node.lineno}: a stub"


def test_no_asyncio_pickle_eval_or_shell() -> None:
    for path in PATHS:
        for line, name, _ in imports(path):
            own_folder = path == "coordinator/journal.py" and name == "pickle"  # its reader admits psctl's classes only
            allowed = own_folder or name.split(".")[0] not in ("asyncio", "pickle", "marshal", "shelve")
            assert allowed, f"{path}:{line}: {name}"
        for node in nodes_of(path):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                own_script = path == "process/bootstrap.py" and called == "exec"  # it is there to run the user's
                assert own_script or called not in ("eval", "exec", "os.system"), f"{path}:{node.lineno}: {called}"
                for keyword in node.keywords:
                    shell = keyword.arg == "shell" and ast.unparse(keyword.value) == "True"
                    assert not shell, f"{path}:{node.lineno}: shell=True"


def test_bytes_of_others_are_decoded_under_every_error_that_a_decoder_raises() -> None:
    """msgspec raises UnicodeDecodeError and RecursionError beside DecodeError: `types.UNDECODABLE` has them all."""
    named = [f"{path}:{node.lineno}" for path in PATHS for node in nodes_of(path)
             if isinstance(node, ast.ExceptHandler) and node.type is not None
             and any(word in ast.unparse(node.type) for word in ("DecodeError", "JSONDecodeError"))
             and "Unicode" not in ast.unparse(node.type)]  # fmt: skip
    assert not named, f"{named}: except UNDECODABLE"


TESTS = PSCTL.parent / "tests"

PRIVATE_USES = {
    "client/test_client_server.py": (1, "records which thread handles a message"),
    "client/test_host_aggregation.py": (8, "breaks a worker's connections of its host; counts the bytes that it sends"),
    "client/test_host_connections.py": (1, "sends a record that no worker sends"),
    "client/test_shared_rows.py": (5, "counts read answers without a message that reports them; finds leaked buffers"),
    "collectives/test_player.py": (2, "a vector's memory is allocated once"),
    "collectives/test_stream_pieces.py": (2, "bounds what is kept of early pieces; shares the lock of a plane"),
    "helpers/gloo_world.py": (1, "`run` does not show its synchronizer to scripts"),
    "helpers/job_world.py": (3, "ends a worker as kill -9 does; reads the states that servers hold"),
    "kv/test_store.py": (8, "counts the wake-ups of a wait; a wait that nothing ends"),
    "ps/test_dense_client.py": (1, "the request that an answer repeats"),
    "ps/test_dense_shard.py": (1, "bounds the free buffers"),
    "sparse/test_embeddings.py": (4, "counts the rows that a worker's cache keeps"),
    "remote/test_ssh.py": (1, "a transfer that stops half-way"),
    "simulation/table_run.py": (1, "no read is left"),
    "sync/test_gpu_staging.py": (2, "a planted bug; a function of torch"),
    "sync/test_local_sgd.py": (2, "`run` does not show its synchronizer to scripts"),
    "sync/test_replacement.py": (1, "whether a rank's examples of the step count"),
    "sync/test_run_strategies.py": (1, "`run` does not show its synchronizer to scripts"),
    "sync/test_staleness.py": (2, "values that have arrived before the wait that shows them"),
    "transport/protocol/test_connection.py": (2, "a peer that writes what no peer writes inside TLS"),
    "worker/test_init.py": (2, "`run` does not show its synchronizer to scripts"),
    "worker/test_prepare.py": (1, "`run` does not show its synchronizer to scripts"),
}
"""By file of tests/: how many uses of psctl's private names it has, and why."""

PLANTED = ("simulation/mutants.py",)
"""Files of tests/ that change psctl's code on purpose."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier()


@functools.cache
def private_names() -> frozenset[str]:
    """Return the private functions, classes, attributes and constants of psctl."""
    nodes = [node for path in PATHS for node in nodes_of(path)]
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return frozenset(filter(private, names))


def private_uses(path: Path) -> list[str]:
    """Return the uses of psctl's private names in a test: attributes, imports, and names that are replaced."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            names = [] if own else [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("psctl"):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("setattr", "getattr"):
            texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            names = [text.rpartition(".")[2] for text in texts]
        found += [f"{path.name}:{node.lineno} {name}" for name in names if name in private_names()]
    return found


def test_tests_use_the_public_names_of_psctl() -> None:
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        if name in PLANTED:
            continue
        uses, (allowed, _) = private_uses(path), PRIVATE_USES.get(name, (0, ""))
        assert len(uses) == allowed, f"{name} uses {len(uses)} private names, {allowed} are allowed: {uses}"
