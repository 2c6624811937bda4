"""What importing costs and loads, who imports whom, and what an installed wheel contains."""

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hgrn_vision import cli

ROOT = Path(__file__).resolve().parent.parent


def run(code, cwd=ROOT, **kwargs):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=True, **kwargs)


def test_import_is_light_and_silent():
    """Beside timm nothing but the model's own files: no other package, no kernel but the plain one, no process."""
    code = """
import sys
import timm
before = set(sys.modules)
sys.addaudithook(lambda event, args: event == "subprocess.Popen" and print(args))
import hgrn_vision
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] not in sys.stdlib_module_names))
"""
    result = run(code)
    (loaded,) = result.stdout.splitlines()
    assert result.stderr == ""
    loaded = [name.removeprefix("hgrn_vision.") for name in ast.literal_eval(loaded)]
    assert "hgrn" in loaded
    allowed = {"hgrn_vision", "version", "files", "kernels", "kernels.torch_scan", *MODEL}
    assert set(loaded) <= allowed, set(loaded) - allowed


@pytest.mark.machine
def test_import_is_quick():
    code = "import time, timm; start = time.process_time(); import hgrn_vision; print(time.process_time() - start)"
    assert float(run(code).stdout) < 0.2


def project_imports(path):
    """Modules of the project that a file imports, as paths like 'train/config' or 'scan'."""
    package = path.relative_to(ROOT).with_suffix("").parts
    package = ("hgrn_vision", *package) if package[0] == "kernels" else package
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            names = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        found |= {name.split(".", 1)[1].replace(".", "/") for name in names if name.startswith("hgrn_vision.")}
    return found


MODEL = ("backend", "block", "conv", "glu", "hgrn", "layers", "packaged", "pyramid", "recompute", "scan", "weights")
FOLDERS = ("export", "inference", "study", "train", "report", "data", "kernels")
# folder or file, the Python files of the folder, what of the project they may import; further down means further right
TABLE = [
    (
        "kernels",
        "reference torch_scan triton_scan triton_chunks triton_sequence triton_group triton_math aot "
        "cpu_library cpu_build cpu_scan cpu_glu cpu_conv cpu_block",
        ("kernels",),
    ),
    ("hgrn_vision", "version files randomness recompute weights", ()),
    ("hgrn_vision", "packaged", ("files",)),
    ("hgrn_vision", "backend", ("kernels",)),
    ("hgrn_vision", "scan glu", ("kernels", "backend")),
    ("hgrn_vision", "conv", ("kernels", "backend", "scan")),
    ("hgrn_vision", "layers", ("scan", "backend", "conv", "glu", "recompute", "kernels/torch_scan")),
    ("hgrn_vision", "block", ("layers", "backend")),
    ("hgrn_vision", "hgrn", ("block", "layers", "packaged", "weights")),
    ("hgrn_vision", "pyramid", ("hgrn", "weights")),
    ("hgrn_vision", "__init__", ("backend", "hgrn", "pyramid", "scan", "version", "weights")),
    (
        "hgrn_vision/data",
        "__init__ spec images digits sources splits transforms batches workers indexed streamed loaders "
        "imagenet near_duplicates pack photos pathfinder",
        ("data", "files", "randomness"),
    ),
    (
        "hgrn_vision/report",
        "__init__ style html page charts gates confusion gallery interpret_figures explanation speed "
        "study study_charts web",
        ("report", "files"),
    ),
    (
        "hgrn_vision/train",
        "__init__ config recipes finetune_recipe build engine evaluation checkpoint run run_folder environment "
        "distributed faults memory observer trackers summary teachers answers distillation photo_splits cost",
        ("train", "report", "data", "hgrn", "weights", "files", "randomness", "version"),
    ),
    (
        "hgrn_vision/study",
        "__init__ definition plan step_time runs folder statistics report",
        ("study", "train", "report", "data", "files"),
    ),
    (
        "hgrn_vision/inference",
        "__init__ pretrained classify interpret metrics",
        ("inference", "train", "data", "weights", "layers"),
    ),
    (
        "hgrn_vision/export",
        "__init__ onnx_file onnx_model int8 run_exported site",
        ("export", "inference", "report", "data", "hgrn", "layers", "files", "version"),
    ),
    (
        "hgrn_vision/commands",
        "__init__ _flags _console _dataset_check _study_display "
        "bench compare digits distill doctor evaluate explain export finetune models pathfinder predict publish train",
        ("commands", *FOLDERS, "files", "randomness", "version", *MODEL),
    ),
    ("hgrn_vision", "cli", ("commands", "train")),
    ("hgrn_vision", "__main__", ("cli",)),
    (".", "train_imagenet", ("cli",)),
]
ROWS = {ROOT / folder / f"{name}.py": allowed for folder, names, allowed in TABLE for name in names.split()}


def test_every_file_is_in_the_table_once():
    files = [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "hgrn_vision").rglob("*.py"), *ROOT.glob("*.py")]
    assert sorted(ROWS) == sorted(files)
    assert len(ROWS) == sum(len(names.split()) for _, names, _ in TABLE)


@pytest.mark.parametrize("path", ROWS, ids=lambda path: str(path.relative_to(ROOT)))
def test_who_imports_whom(path):
    for name in project_imports(path):
        assert any(f"{name}/".startswith(f"{allowed}/") for allowed in ROWS[path]), f"{path} imports {name}"


def test_no_command_imports_another():
    commands = {path.stem for path in (ROOT / "hgrn_vision" / "commands").glob("[!_]*.py")}
    assert commands == set(cli.COMMANDS)
    for path in (ROOT / "hgrn_vision" / "commands").glob("*.py"):
        imported = {name.split("/")[1] for name in project_imports(path) if name.startswith("commands/")}
        assert not imported & commands, path


def test_every_package_that_is_imported_is_declared():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    declared = set(re.findall(r"^[A-Za-z0-9_]+", settings["options"]["install_requires"], re.MULTILINE))
    imported = set()
    for path in ROWS:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.split(".")[0])
    names = {"PIL": "pillow", "yaml": "pyyaml"}
    others = imported - sys.stdlib_module_names - {"hgrn_vision"}
    assert {names.get(name, name) for name in others} <= declared


def test_generators_are_seeded_in_one_module():
    seeding = re.compile(r"manual_seed\(|RandomState\(|random\.seed\(|default_rng\(")
    found = {path.stem for path in ROWS if "kernels" not in path.parts and seeding.search(path.read_text())}
    assert found == {"randomness"}


def test_no_file_is_called_like_one_of_timms():
    import timm.models

    theirs = {path.stem for path in Path(timm.models.__file__).parent.glob("*.py")} - {"__init__"}
    ours = {path.stem for path in (ROOT / "hgrn_vision").glob("*.py")}
    assert not theirs & ours


def test_a_plain_install_has_the_kernels_and_the_weights(tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--quiet"]
    source = tmp_path / "source"
    source.mkdir()
    # a copy, so that the build leaves nothing in the checkout
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "hgrn_vision", "kernels"):
        subprocess.run(["cp", "-r", ROOT / name, source / name], check=True)
    pretrained = source / "hgrn_vision" / "pretrained"
    pretrained.mkdir(exist_ok=True)
    for name in ("SHA256SUMS", "a.b.safetensors"):
        (pretrained / name).touch()
    weights = {path.name for path in pretrained.iterdir()}
    subprocess.run([*command, "--target", tmp_path / "site", source], check=True)
    code = (
        "import hgrn_vision, hgrn_vision.kernels.reference as r, pathlib; folder = pathlib.Path(r.__file__).parent; "
        "print(folder); print(sorted(p.name for p in folder.iterdir()))"
    )
    result = run(code, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path)})
    folder, files = result.stdout.splitlines()
    assert folder == str(tmp_path / "site" / "hgrn_vision" / "kernels")
    assert {path.name for path in (ROOT / "kernels").glob("*.[pch]*")} <= set(ast.literal_eval(files))
    assert not (tmp_path / "site" / "kernels").exists()
    pages = [path.relative_to(ROOT) for path in (ROOT / "hgrn_vision" / "report").glob("web/*")]
    assert pages and all((tmp_path / "site" / path).is_file() for path in pages)
    assert {path.name for path in (tmp_path / "site" / "hgrn_vision" / "pretrained").iterdir()} == weights


def test_the_readmes_example_runs(tmp_path):
    example = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    run(example, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "HGRN_VISION_BACKEND": "torch"})


@pytest.mark.parametrize("folder", ["data", "report", "train", "study", "inference", "export"])
def test_only_commands_print_and_parse(folder):
    """The rest is used from Python too: showing things is the command's part."""
    paths = list((ROOT / "hgrn_vision" / folder).glob("*.py"))
    assert paths
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Name) and node.id == "print"), path
            assert not (isinstance(node, ast.Import) and "argparse" in [name.name for name in node.names]), path
