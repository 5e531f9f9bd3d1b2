"""The rules that keep the core small: who may import whom, who may know whom, and what is never called."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from engine import published
from engine.assembly.discovery import discover
from engine.contracts.config import PluginSettings

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "core" / "engine"
PLUGINS = ROOT / "plugins" / "engine_plugins"
LAB = ROOT / "plugins" / "engine_lab"
TEMPLATES = CORE / "cli" / "plugins" / "templates"
"""What new plugins start from: not parts of the core, but plugins and their tests."""

MAY_IMPORT = {
    "plugin_guard": {"plugin_guard"},
    "checkpoint": {"checkpoint", "contracts"},
    "contracts": {"contracts", "native"},
    "counters": {"counters", "contracts"},
    "native": {"native"},
    "assembly": {"assembly", "models", "plugin_guard", "checkpoint", "contracts", "hookspecs", "native", "version"},
    "models": {"models", "plugin_guard", "checkpoint", "contracts"},
    "kernels": {"kernels", "models", "plugin_guard", "checkpoint", "contracts", "native"},
    "kv": {"kv", "kernels", "models", "plugin_guard", "contracts"},
    "sampling": {"sampling", "plugin_guard", "kernels", "contracts", "native"},
    "step": {"step", "ranks", "sampling", "kv", "kernels", "contracts"},
    "ranks": {"ranks", "assembly", "step", "plugin_guard", "kernels", "models", "contracts"},
    "drafting": {"drafting", "plugin_guard", "step", "sampling", "kv", "kernels", "models", "checkpoint", "contracts"},
    "loop": {"loop", "plugin_guard", "drafting", "ranks", "step", "kv", "machine", "contracts"},
    "startup": {
        "startup",
        "plugin_guard",
        "checkpoint",
        "native",
        "loop",
        "drafting",
        "ranks",
        "step",
        "sampling",
        "kv",
        "kernels",
        "models",
        "assembly",
        "contracts",
        "version",
    },
    "service": {
        "service",
        "counters",
        "plugin_guard",
        "checkpoint",
        "startup",
        "loop",
        "assembly",
        "contracts",
        "native",
    },
    "http": {"http", "service", "plugin_guard", "startup", "loop", "assembly", "machine", "contracts"},
    "grpc": {"grpc", "service", "assembly", "contracts"},
    "cli": {"cli", "testing", "grpc", "http", "service", "plugin_guard", "assembly", "contracts", "version"},
}
"""Packages of the core and what each may import of it (``testing`` may import all: it runs everything)."""

SHOWS_PLUGINS = ("cli/", "testing/")
"""Whose help shows what one may choose; whose suites run whole engines."""
HYDRA_ONLY_IN = "assembly/compose/"
AIOHTTP_ONLY_IN = "http/"
GRPC_ONLY_IN = "grpc/"
GRPC = ("grpc", "google", "grpc_health", "grpc_reflection", "smg_grpc_proto")
PLUGGY_ONLY_IN = ("assembly/discovery.py", "hookspecs.py")
TORCH_FREE = (
    "plugin_guard", "checkpoint", "contracts", "native", "models", "assembly", "cli", "grpc", "http", "service", "loop",
    "kv", "counters",
)  # fmt: skip
WITH_TENSORS = ("checkpoint/tensors.py", "kv/cache.py", "kv/records.py")


def sources(folder: Path) -> list[Path]:
    files = sorted(folder.rglob("*.py"))
    return files if folder == TEMPLATES else [file for file in files if TEMPLATES not in file.parents]


def relative(file: Path) -> str:
    return file.relative_to(CORE).as_posix()


@cache
def imports(tree: ast.AST, top_level_only: bool = False) -> tuple[str, ...]:
    """Imported module names; relative imports stay inside their package and are left out.

    ``top_level_only`` leaves out functions and ``TYPE_CHECKING`` blocks: what importing the file imports.
    """
    return tuple(found_imports(tree, top_level_only))


def found_imports(tree: ast.AST, top_level_only: bool) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.level == 0)
        elif not (top_level_only and is_deferred(node)):
            yield from found_imports(node, top_level_only)


def is_deferred(node: ast.AST) -> bool:
    in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return in_function or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


@cache
def calls(file: Path) -> tuple[tuple[ast.Call, str], ...]:
    """Calls of a file, each with what it calls, as it is written."""
    return tuple((node, written(node.func)) for node in ast.walk(parsed(file)) if isinstance(node, ast.Call))


def written(node: ast.expr) -> str:
    """As ``ast.unparse``, which takes much longer for a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
        return f"{written(node.value)}.{node.attr}"
    return ast.unparse(node)


def test_imports_in_the_core_point_one_way():
    wrong = []
    for package, allowed in MAY_IMPORT.items():
        for file in sources(CORE / package):
            for name in imports(parsed(file)):
                library, _, rest = name.partition(".")
                inner = rest.partition(".")[0]
                is_part = (CORE / inner).is_dir() or inner in ("hookspecs", "machine", "published", "version")
                if library == "engine" and inner and is_part and inner not in allowed:
                    wrong.append(f"{relative(file)} imports {name}")
    assert wrong == []


def modules() -> dict[str, Path]:
    """Every module of core and plugins, by the name it is imported by."""
    found = {}
    for root in (CORE.parent, PLUGINS.parent):
        for file in (*sources(CORE), *sources(PLUGINS), *sources(LAB)):
            if file.is_relative_to(root):
                parts = file.relative_to(root).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def test_no_file_is_part_of_a_circle_of_imports():
    """Imports for type checkers and within functions count, too."""
    known = modules()
    uses = {
        name: {target for found in imports(parsed(file)) if (target := nearest_module(found, known)) not in ("", name)}
        for name, file in known.items()
    }
    while leaves := [name for name, targets in uses.items() if not targets & uses.keys()]:
        for name in leaves:
            del uses[name]
    assert uses == {}, "these import each other, or import such"


def nearest_module(imported: str, known: Iterable[str]) -> str:
    """The module that ``package.name`` is, or that has it; empty: none of ours."""
    while imported and imported not in known:
        imported = imported.rpartition(".")[0]
    return imported


def test_every_package_of_the_core_has_its_rule():
    packages = {path.name for path in CORE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert packages == {*MAY_IMPORT, "testing"}


def test_the_core_never_imports_a_plugin():
    names = ((file, name) for file in sources(CORE) for name in imports(parsed(file)))
    wrong = [f"{relative(file)}: {name}" for file, name in names if name.startswith(("engine_plugins", "engine_lab"))]
    assert wrong == []


def within(name: str, packages: Sequence[str]) -> bool:
    """Whether a module is one of these packages, or in one."""
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def test_code_outside_the_core_imports_only_what_is_published_of_it():
    contributed = sorted(ROOT.glob("contrib/*/*.py"))
    outside = {published.PLUGINS: [*sources(PLUGINS), *contributed], published.LAB: sources(LAB)}
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for allowed, files in outside.items()
        for file in files
        for name in imports(parsed(file))
        if name.split(".")[0] == "engine" and not within(name, allowed)
    ]
    assert contributed and wrong == []


def test_the_lab_and_the_plugins_know_little_of_each_other():
    """Alerts are rules of the lab, which an exporter posts; a machine is measured with rounded weights."""
    of_plugins = {name for file in sources(PLUGINS) for name in imports(parsed(file)) if name.startswith("engine_lab.")}
    of_lab = {name for file in sources(LAB) for name in imports(parsed(file)) if name.startswith("engine_plugins.")}
    assert {name.rpartition(".")[0] for name in of_lab} == {"engine_plugins.quantizer.rounding"}
    assert all(within(name, ("engine_lab.alerts", "engine_lab.shared.live")) for name in of_plugins)


def test_commands_of_the_lab_build_on_each_other_one_way():
    """A folder may use another one, which then may not use it, by whatever way."""
    folders = [folder for folder in LAB.iterdir() if sources(folder)]
    uses = {folder.name: {name for file in sources(folder) for name in imports(parsed(file))} for folder in folders}
    uses = {
        name: {other for other in uses if any(within(each, (f"engine_lab.{other}",)) for each in used)} - {name}
        for name, used in uses.items()
    }
    assert uses["shared"] == set() and uses["bench"] == {"shared"}
    TopologicalSorter(uses).prepare()  # raises where there is a circle


def test_contributed_plugins_stand_by_themselves():
    files = ROOT.glob("contrib/*/*.py")
    assert [f"{file}: {name}" for file in files for name in imports(parsed(file)) if "engine_plugins" in name] == []


def test_templates_import_only_what_the_guide_publishes():
    published = ("checkpoint", "contracts", "hookspecs", "testing", "cli.plugins.templates")
    allowed = tuple(f"engine.{name}" for name in published)
    wrong = [
        f"{file.relative_to(TEMPLATES)}: {name}"
        for file in sources(TEMPLATES)
        for name in imports(parsed(file))
        if name.split(".")[0] in ("engine", "engine_plugins") and not within(name, allowed)
    ]
    assert wrong == [] and len(sources(TEMPLATES)) > 20


def test_hydra_pluggy_aiohttp_and_grpc_stay_in_their_place():
    wrong = []
    for file in sources(CORE):
        where = relative(file)
        for name in imports(parsed(file)):
            library = name.split(".")[0]
            if library in ("hydra", "omegaconf") and not where.startswith(HYDRA_ONLY_IN):
                wrong.append(f"{where}: {name}")
            if library == "aiohttp" and not where.startswith(AIOHTTP_ONLY_IN):
                wrong.append(f"{where}: {name}")
            if library in GRPC and not where.startswith(GRPC_ONLY_IN):
                wrong.append(f"{where}: {name}")
            if library == "pluggy" and where not in PLUGGY_ONLY_IN:
                wrong.append(f"{where}: {name}")
    assert wrong == []


def test_hydra_is_imported_only_when_something_is_composed():
    files = sources(CORE / "assembly" / "compose")
    names = [name for file in files for name in imports(parsed(file), top_level_only=True)]
    assert files and not [name for name in names if name.split(".")[0] in ("hydra", "omegaconf")]


def test_torch_is_not_imported_by_the_front_of_the_house():
    files = [f for package in TORCH_FREE for f in sources(CORE / package) if relative(f) not in WITH_TENSORS]
    imported_by_the_front = ("output.py", "process.py", "memory/report.py")
    files += [CORE / "startup" / name for name in imported_by_the_front]
    files += [*PLUGINS.glob("*/__init__.py"), *PLUGINS.glob("*/config.py"), *sources(LAB / "bench")]
    files += [*LAB.glob("*/command.py"), *sources(PLUGINS / "architecture")]
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in imports(parsed(file), top_level_only=True)
        if name.split(".")[0] in ("torch", "triton")
    ]
    assert len(files) > len(TORCH_FREE) and wrong == []


BY_MODULE_NAME = """
import importlib, pkgutil, sys
for package in (importlib.import_module(name) for name in sys.argv[1:]):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
sys.exit(", ".join(name for name in ("torch", "triton", "transformers") if name in sys.modules) or 0)
"""


def test_describing_a_model_imports_no_torch_by_any_way():
    """The API process imports the architecture's module to resolve a plan."""
    packages = ["engine_plugins.architecture", "engine.models", "engine.assembly"]
    done = subprocess.run([sys.executable, "-c", BY_MODULE_NAME, *packages], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


LOOKS_AT = (ast.Compare, ast.Match, ast.MatchValue, ast.Subscript, ast.Dict, ast.Set)
"""Where a name may stand that something is compared with, or looked up by."""
COMPARES = ("startswith", "endswith", "removeprefix", "removesuffix", "get", "index", "count", "find", "match")
"""Methods that do so."""


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and texts that something may be compared with."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, is_compared = waiting.pop()
        if is_compared and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        is_call = isinstance(node, ast.Call) and written(node.func).rpartition(".")[2] in COMPARES
        inside = is_compared or is_call or isinstance(node, LOOKS_AT)
        waiting += ((part, inside) for part in ast.iter_child_nodes(node))


def test_the_core_knows_no_plugin_by_name():
    """No string constant in the core is the name of a built-in plugin, where a name could be compared."""
    names = {offer.name for offer in discover(PluginSettings(third_party=False)).offers}
    # words that also mean something else in the core: a library, kernels, a device, a dtype, a side, a key of JSON
    common = {"none", "torch", "triton", "native", "cpu", "int8", "fp8", "suffix", "prefix", "host"}
    found = {
        f"{relative(file)}:{line} compares with {text!r}"
        for file in sources(CORE)
        if not relative(file).startswith("testing/")
        for line, text in compared(parsed(file))
        if text in names - common
    }
    assert names > common and found == set()


MODEL_TYPES = (
    "apertus", "arcee", "baichuan", "bloom", "chatglm", "cohere", "command_r", "dbrx", "deepseek", "ernie", "exaone",
    "falcon", "gemma", "glm", "gpt2", "gpt_neox", "gpt_oss", "gptj", "granite", "hunyuan", "internlm", "jamba", "kimi",
    "llama", "minicpm", "ministral", "mistral", "mixtral", "mpt", "nemotron", "olmo", "olmoe", "phi", "qwen", "qwq",
    "seed_oss", "smollm", "stablelm", "starcoder", "vicuna",
)  # fmt: skip
"""Spellings of ``model_type``, without numbers after them."""
A_ROTATION = re.compile(r"\b_?llama3\b")
"""What ``config.json`` calls one way to stretch it, whatever the family."""
MAY_NAME_FAMILIES = {
    # published models that each limit is beyond
    "checkpoint/limits.py": {"deepseek", "gemma", "granite", "llama", "qwen"},
    "service/tokenizer_file.py": {"gemma"},
}


def words(text: str) -> str:
    """In lower case, words of a name apart: ``Qwen3NextForCausalLM`` is ``qwen3_next_for_causal_lm``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower()


def built_in_families() -> set[str]:
    """What the checkpoints that built-in architectures compute call themselves, without what follows a number."""
    given = [
        part.value
        for file in (PLUGINS / "architecture").rglob("config.py")
        for part in ast.walk(parsed(file))
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    named = [re.fullmatch(r"(\w+?)For(CausalLM|ConditionalGeneration)", text) for text in given]
    stems = {re.split(r"\d", words(found[1]))[0] for found in named if found}
    return {re.sub(r"_[a-z]?$", "", stem) for stem in stems}


def families_in(text: str, families: Iterable[str]) -> set[str]:
    """Those that a text names, as a word of it or of an identifier in it; numbers may follow, letters may not."""
    spelled = (r"[ _.-]?".join(family.split("_")) for family in sorted(families))
    named = re.compile(rf"(?<![a-z])(?:{'|'.join(spelled)})(?![a-z])")
    text = A_ROTATION.sub("", text)
    return {re.sub(r"\W|_", "", name) for form in (words(text), text.lower()) for name in named.findall(form)}


def test_the_core_knows_no_family_of_models():
    """No source of the core names one, be it in a comparison, in an identifier or in a comment, but for what is said
    above. What a family means is read by its architecture."""
    families = built_in_families() | set(MODEL_TYPES)
    assert {"llama", "mistral", "qwen"} <= built_in_families()
    files = [*sources(CORE), *(file for ending in ("cpp", "h") for file in CORE.rglob(f"*.{ending}"))]
    found = {
        relative(file): names
        for file in files
        if not relative(file).startswith("testing/") and (names := families_in(file.read_text("utf-8"), families))
    }
    assert found == MAY_NAME_FAMILIES


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('if family.startswith("qwen"):', {"qwen"}),
        ('x in ("LlamaForCausalLM",)', {"llama"}),
        ("def is_qwen3_next(model):", {"qwen"}),
        ("class SmolLM3Config: ...", {"smollm"}),
        ("DeepSeek-V3, deepseek_v2", {"deepseek"}),
        ("GptOss", {"gptoss"}),
        ("gpt-oss", {"gptoss"}),
        ("# of PhiMoE and of Phi-4", {"phi"}),
        ('if kind == "llama3": _llama3(base)', set()),
        ("is_llama3_model, LLAMA_LIKE", {"llama"}),
        ("philox, prompts, glmnet, seed, oss, chapters", set()),
    ],
)
def test_a_name_of_a_family_is_seen_however_it_is_written(text, found):
    assert families_in(text, MODEL_TYPES) == found


def test_the_core_proposes_no_plugin_by_name():
    """No string in the core, be it an error or a docstring, has ``slot=name`` of a built-in plugin."""
    offers = discover(PluginSettings(third_party=False)).offers
    chosen = re.compile("|".join(rf"\b{offer.slot}={offer.name}\b" for offer in offers))
    assert len(offers) > 20 and chosen.search("take drafter=none or kv_format=int8")
    wrong = []
    for file in sources(CORE):
        if relative(file).startswith(SHOWS_PLUGINS):
            continue
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                wrong += [f"{relative(file)}:{node.lineno} says {found}" for found in chosen.findall(node.value)]
    assert wrong == []


FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


@pytest.mark.parametrize("folder", [CORE, PLUGINS, TEMPLATES], ids=["core", "plugins", "templates"])
def test_nothing_is_pickled_or_evaluated(folder):
    wrong = []
    for file in sources(folder):
        where = file.relative_to(ROOT).as_posix()
        wrong += [f"{where}: imports {n}" for n in imports(parsed(file)) if n.split(".")[0] in FORBIDDEN_MODULES]
        for node, called in calls(file):
            if called in FORBIDDEN_CALLS or called in ("torch.load", "yaml.load", "os.system"):
                wrong.append(f"{where}:{node.lineno} calls {called}")
            if any(k.arg in ("shell", "trust_remote_code") and getattr(k.value, "value", 0) for k in node.keywords):
                wrong.append(f"{where}:{node.lineno} {called} with shell or trust_remote_code")
    assert wrong == []


def test_no_child_runs_files_of_the_current_folder():
    """``python -m`` would take them for the libraries that they are named as; what ``PYTHONPATH`` names is found."""
    commands = [
        (file.name, node.args if isinstance(node, ast.Call) else node.elts)
        for file in (*sources(CORE), *sources(PLUGINS), *sources(LAB))
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.List | ast.Tuple | ast.Call)
    ]
    pythons = [
        (name, [ast.unparse(part) for part in parts[:2]])
        for name, parts in commands
        if parts and isinstance(parts[0], ast.Attribute) and written(parts[0]) == "sys.executable"
    ]
    with_given_flags = ("actor.py", ["sys.executable", "*arguments"])
    assert with_given_flags in pythons and len(pythons) > 8
    assert [command for command in pythons if command[1][1] != "'-P'" and command != with_given_flags] == []


WALL_CLOCK = {
    "core/engine/native/file_cache.py",  # ages of files
    "core/engine/service/chat_template.py",  # the date, for templates
    "core/engine/service/prepare.py",  # "created"
    "core/engine/service/batches/store.py",  # "created_at", "expires_at"
    "core/engine/service/response_store.py",  # how long responses lie in a folder
    "core/engine/grpc/vllm_engine.py",  # "timestamp"
    "core/engine/http/state.py",  # "created"
    "core/engine/http/ollama_format.py",  # "created_at"
    "plugins/engine_plugins/exporter/otlp.py",  # times of spans
    "plugins/engine_plugins/exporter/outbox.py",  # "Retry-After", as a date
    "plugins/engine_plugins/exporter/webhook.py",  # when an alert began
    "plugins/engine_plugins/exporter/trace.py",  # when a part of a trace began
    "core/engine/kernels/disk_cache.py",  # ages of files
    "plugins/engine_plugins/kv_store/command/archive.py",  # ages of files
    "plugins/engine_plugins/kv_store/command/folder.py",  # ages of files
    "plugins/engine_plugins/kv_store/disk.py",  # ages of files
}
"""What asks for the time of day, and what for. Whatever takes its time is measured by a clock that never jumps."""


def test_nothing_is_timed_by_a_clock_that_jumps():
    asks = set()
    for file in (*sources(CORE), *sources(PLUGINS), *sources(LAB)):
        called = {name for _, name in calls(file)}
        if any(name.endswith(("time.time", "time.time_ns", "datetime.now", "datetime.utcnow")) for name in called):
            asks.add(file.relative_to(ROOT).as_posix())
        assert "time.time" not in imports(parsed(file)), f"{file}: from time import time hides it from this test"
    assert asks == WALL_CLOCK


def test_the_readme_and_ci_run_the_same_test_line():
    ci = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert re.search(rf"^{re.escape(ci)}$", (ROOT / "README.md").read_text(), re.MULTILINE)
