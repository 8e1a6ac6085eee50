"""README and docs/ say what is so: snippets run and print what is shown, commands and files exist, links lead
somewhere.
"""

import ast
import contextlib
import doctest
import functools
import io
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import metadata
from pathlib import Path

import jax
import numpy as np
import pytest
from chats import conversation, write_lines, write_tokenizer

import jaxpar as jp
from jaxpar.hardware import missing_compiler
from jaxpar.models import NAMES, gpt, llama, mixtral, mlp, resnet
from jaxpar.run.cli import main
from jaxpar.strategy import PRESETS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "experiments").rglob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Small sizes of the models that pages name; 4 layers for 4 stages.
SMALL = {
    "llama-tiny": "llama-tiny,layers=4,dim=16,heads=2,kv_heads=2,ffn=32",
    "gpt-tiny": "gpt-tiny,layers=1,dim=16,heads=2",
    "mlp-tiny": "mlp-tiny,layers=1,hidden=16",
}
# Options that make a command that a page shows short enough for a test. Samples of text are tested in tests/run/cli,
# and plans for several devices in tests/forecast.
SHORT = {
    "train": "--steps 2 --evaluate-batches 1 --sample 0",
    "timeline": "",
    "doctor": "--bytes 4096",
    "check": "",
    "convert": "",
    "--version": "",
    "explain": "",
    "plan": "--model llama-tiny,layers=1,dim=16,heads=2,kv_heads=2,ffn=32 --target 1xH100 --batch 1 --seq 32 --top 1 "
    "--tokens 1k",
}
WIDTH = 92  # columns of code that the site shows at a desk; what is wider is cut, and must be scrolled
FAMILIES = (gpt, llama, mixtral, mlp, resnet)
SHOWN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Snippet:
    """A fenced block: its language, its text, the line of the page that the text begins on."""

    language: str
    text: str
    line: int


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text()
    return [Snippet(m[1], m[2], text.count("\n", 0, m.start(2)) + 1) for m in FENCE.finditer(text)]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


# Pages whose programs take ten seconds and more: left to CI.
LONG = (
    "chats",
    "coupled-rows",
    "equinox-haiku",
    "inference",
    "losses",
    "memory",
    "nonfinite",
    "optimizers",
    "own",
    "profiling",
)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=[pytest.mark.slow] if page.stem in LONG else [])
        for page in PAGES
        if re.search("```(python|diff)", page.read_text())
    ],
)
def test_snippets_print_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The snippets of a page are one program; a `text` block after one is what it prints.

    A `diff` block is two programs, which print the same; the new one goes on.
    """
    for package in ("equinox", "haiku"):
        if f"import {package} as" in page.read_text():
            pytest.importorskip(package, reason=f"{package} is not installed")
    blocks = snippets(page)
    if any(block.language == "python" and "./Llama-3.2-1B" in block.text for block in blocks):
        monkeypatch.chdir(tmp_path)
        provide_model(request.getfixturevalue("llama_folder"))
    program: dict[str, object] = {"__name__": "__main__"}
    for block, after in zip(blocks, [*blocks[1:], Snippet("", "", 0)], strict=True):
        programs = [(block.text, program)] if block.language == "python" else []
        if block.language == "diff":
            old, new = (
                re.sub(rf"^(?:[{own} ](.*)|[{other}].*)$", r"\1", block.text, flags=re.M) for own, other in ("-+", "+-")
            )
            programs = [(old, {"__name__": "__main__"}), (new, program)]
        for text, names in programs:
            printed = io.StringIO()
            # Blank lines above, so that a traceback points into the page.
            code = compile("\n" * (block.line - 1) + text, str(page), "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, names)
            if after.language == "text":
                got = printed.getvalue()
                assert doctest.OutputChecker().check_output(after.text, got, SHOWN), (
                    f"{name(page)}:{after.line} shows\n{after.text}and its program prints\n{got}"
                )


@functools.cache  # some stand on several pages
def ran(*words: str) -> None:
    """In this process: `test_cli.py` has the command in its own, whose start takes as long as a tiny model."""
    main(words)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all commands, as a user has it: what `plan` has compiled once it need not compile again."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stands for a model that was downloaded."""
    vocab = write_tokenizer(folder := tmp_path_factory.mktemp("hf"))
    sizes = llama.Config(vocab=vocab, dim=16, layers=1, heads=2, kv_heads=1, ffn=16, tied=True)
    params, _ = jp.from_nnx(lambda rngs: llama.Llama(sizes, rngs=rngs), llama.loss).create(jax.random.key(0))
    llama.to_hf(sizes, params, folder, dtype="bfloat16")
    return folder


def provide_model(folder: Path) -> None:
    """Put the model, and data for it, into the current folder."""
    shutil.copytree(folder, "Llama-3.2-1B", dirs_exist_ok=True)
    np.save("ids.npy", np.arange(4000) % 64)
    write_lines(Path("chats.jsonl"), *[conversation("Hi", "Hello!")] * 40)


@pytest.mark.xdist_group("commands")
@pytest.mark.parametrize("page", [page for page in PAGES if "```sh" in page.read_text()], ids=name)
def test_commands_exist(
    page: Path, tmp_path: Path, cache: Path, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXPAR_CACHE", str(cache))
    lines = [line for block in snippets(page) if block.language == "sh" for line in commands(block)]
    for number, line in enumerate(lines):
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            # Some files may already be made; that the targets are known is what counts.
            # With an interpreter it need not look for one, which takes longer than all else.
            command = ["make", "--dry-run", f"PYTHON={sys.executable}", *words[1:]]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        elif words == ["pip", "wheel", "--no-deps", "."]:  # `make package` makes it
            continue
        elif words[:2] == ["pip", "install"]:
            extras = re.fullmatch(r"(?:jaxpar|\.)(?:\[(\w+)\])?", words[-1])
            assert extras, line
            assert extras[1] is None or extras[1] in (metadata("jaxpar").get_all("Provides-Extra") or []), line
        elif words[0] == "jaxpar":
            assert words[1] in SHORT, f"{name(page)} shows {line!r}, and no test knows how to cut it short"
            if words[1] == "plan" and missing_compiler():
                continue
            short = [] if "--steps 0" in line else SHORT[words[1]].split()
            if words[1] == "plan":  # adapters stay: a plan with them has other parameters, FLOPs and gradients
                adapters = re.search(r",lora=\d+", line)
                short[1] += adapters[0] if adapters else ""
            if any(word.startswith("./Llama-3.2-1B") for word in words):
                provide_model(llama_folder)
            if "--step" in words:
                steps = "import jax.numpy as jnp\nmake = lambda: (jnp.sin, (jnp.ones(8),))\n"
                (tmp_path / "steps.py").write_text(steps)
            if words[1] == "train" and "--steps 0" not in line and "--out" not in words:
                short += ["--out", str(tmp_path / str(number))]
            if words[1] == "train" and "--model" not in words:
                short += ["--model", SMALL["llama-tiny"]]
            ran(*(SMALL.get(word, word) for word in words[1:]), *short)
        elif words[0] == "python":
            assert (ROOT / words[1]).exists(), line
        elif words[0].startswith(".venv/bin/python"):
            assert words[1:3] == ["-m", "pytest"], line
            assert all((ROOT / word).exists() for word in words if word.endswith(".py")), line
        else:
            raise AssertionError(f"{name(page)} shows {line!r}, and no test knows how to try it")


def commands(block: Snippet) -> list[str]:
    """One a line, or over several that end in a backslash."""
    return block.text.replace("\\\n", " ").splitlines()


def test_code_is_not_cut() -> None:
    for page in PAGES:
        for block in snippets(page):
            if block.language in ("python", "sh") and (page.is_relative_to(ROOT / "docs") or page.name == "README.md"):
                for at, line in enumerate(block.text.splitlines(), block.line):
                    assert len(line) <= WIDTH, f"{name(page)}:{at} has {len(line)} columns; wrap it at {WIDTH}: {line}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"(?:\]\(|(?:src|srcset)=\")([^)#\"]+)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{name(page)}: {target}"


def test_files_named_in_docs_are_there() -> None:
    for page in PAGES:
        for path in re.findall(r"`((?:jaxpar|tests|experiments|benchmarks|docs)/[\w/.]*)`", page.read_text()):
            assert (ROOT / path).exists(), f"{name(page)} names {path}"


def test_the_site_links_to_the_repository_that_the_package_names() -> None:
    """Nobody else knows the address: it has none yet, and stands in pyproject.toml once it has."""
    files = ROOT / "pyproject.toml", ROOT / "zensical.toml"
    package, site = (tomllib.loads(file.read_text())["project"] for file in files)
    assert site.get("repo_url") == package.get("urls", {}).get("Repository")


def test_every_page_is_in_the_navigation_once() -> None:
    text = (ROOT / "zensical.toml").read_text()
    assert tomllib.loads(text)["project"]["nav"]
    pages = re.findall(r'"([\w/-]+\.(?:md|ipynb))"', text)
    assert sorted(pages) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_the_table_of_models_holds_them_all_with_their_parameters() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| `([\w.-]+)` \| ([\d,]+) ", page, re.M)
    shown = {model: int(count.replace(",", "")) for model, count in rows}
    known = {model: sizes.parameters for family in FAMILIES for model, sizes in family.SIZES.items()}
    assert shown == known
    assert known.keys() == {*NAMES}


def test_the_page_of_errors_quotes_messages_of_the_code() -> None:
    def texts(tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)

    said = [text for path in (ROOT / "jaxpar").rglob("*.py") for text in texts(ast.parse(path.read_text()))]
    messages = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "errors.md").read_text(), re.M)
    assert len(messages) > 15
    for message in messages:
        pattern = re.compile(".*".join(re.escape(part) for part in message.split("...")))
        assert any(pattern.search(text) for text in said), f"docs/errors.md quotes {message!r}, which nothing says"


def test_the_page_of_the_command_line_has_every_command_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    main(["--help"])
    listed = re.findall(r"^  ([\w-]+)  +\w", capsys.readouterr().out, re.M)
    assert sorted(re.findall(r"^\| `jaxpar ([\w-]+)`", page, re.M)) == sorted(listed)
    # The launcher sets the rest for the processes that it starts.
    by_launcher = {"LAUNCHER", "RESTART", "RESTARTS"}
    code = "".join(path.read_text() for path in (ROOT / "jaxpar").rglob("*.py"))
    assert set(re.findall(r"`(?:JAXPAR)?_(\w+)", page)) == set(re.findall(r"JAXPAR_([A-Z_]*[A-Z])", code)) - by_launcher


def test_what_other_libraries_call_it_is_a_strategy() -> None:
    """`context` and `expert` were "none yet" long after they were there: what the tables say here is tried."""
    rows = re.findall(r"^\|.*\| (.*) \|$", (ROOT / "docs" / "from-pytorch.md").read_text(), re.MULTILINE)
    tried = set[str]()
    for text in re.findall(r"`\"?((?:\w+|[\w,]+=[\w,=-]+))\"?`", " ".join(rows)):
        words = dict(part.split("=") for part in re.sub(r"=[a-z]\b", "=2", text).split(",") if "=" in part)
        if text in PRESETS:
            tried.add(str(jp.Strategy.parse(text)))
        elif words:
            layered = words.get("remat") == "auto" or "offload" in words  # not beside pipe
            axes = ("context", "tensor", *([] if layered else ["pipe"]))
            others = {axis: "2" for axis in axes if axis not in words}
            tried.update(words)
            jp.Strategy.parse(",".join(f"{name}={value}" for name, value in (others | words).items()))
    assert {"context", "expert", "attention", "schedule", "chunks", "fsdp=-1"} <= tried
