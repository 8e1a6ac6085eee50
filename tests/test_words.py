"""How the code reads, in figures. Each limit is what was reached so far: it may fall and never rise.

A name should be a noun or a verb of the field; a docstring should begin with a sentence that has a verb, or with a noun
phrase that names the thing; a comment should say why. A test cannot judge these. It counts what is surely none of them.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxpar"
FILES = sorted(PACKAGE.rglob("*.py"))
# Pronouns, bare participles, and adjectives without a noun.
VAGUE_NAMES = set(
    "found each own mine here there given made kept held left other others every one ones what work also known said "
    "wanted taken done gone some any_ much least most such those these it all_ both two three few thing things whole "
    "back before after".split()
)
NO_SUBJECT = re.compile(
    r"(Of|That of|Those of|Those|That|What|As it|As they|As for|The same|The reverse|The one|The other|Likewise|"
    r"Besides|Whose|Which)\b"
)
LIMITS = {
    "vague names in 1,000": 4,
    "summaries without a subject in 1,000": 0,
    "lines of code for each comment line": 12,
    "functions over 60 lines": 13,
    "functions over 80 lines": 0,
    "functions with over 6 parameters": 16,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in FILES}


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(PACKAGE.parent)}:{getattr(node, 'lineno', 1)}"


def bound_names(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node
        elif isinstance(node, ast.arg):
            yield node.arg, node
        elif isinstance(node, Function):
            yield node.name.lstrip("_"), node


def functions(trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, Function]]:
    for path, tree in trees.items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, Function))


def test_names_say_something(trees: dict[Path, ast.Module]) -> None:
    names = [(name, path, node) for path, tree in trees.items() for name, node in bound_names(tree)]
    vague = [f"{place(path, node)}: {name}" for name, path, node in names if name.lower() in VAGUE_NAMES]
    assert len(vague) <= LIMITS["vague names in 1,000"] / 1000 * len(names), "\n".join(vague)


def test_docstrings_begin_with_a_subject(trees: dict[Path, ast.Module]) -> None:
    summaries = [
        (place(path, node), summary)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED) and (summary := ast.get_docstring(node))
    ]
    bad = [f"{where}: {summary.splitlines()[0]}" for where, summary in summaries if NO_SUBJECT.match(summary)]
    assert len(bad) <= LIMITS["summaries without a subject in 1,000"] / 1000 * len(summaries), "\n".join(bad)


def test_comments_say_why_often_enough(trees: dict[Path, ast.Module]) -> None:
    code = comments = 0
    for path, tree in trees.items():
        in_docstring: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
                in_docstring |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.strip() and number not in in_docstring:
                comments += line.strip().startswith("#")
                code += not line.strip().startswith("#")
    assert code <= LIMITS["lines of code for each comment line"] * comments, f"1 in {code / comments:.1f}"


def test_functions_are_short(trees: dict[Path, ast.Module]) -> None:
    lengths = {place(path, node): (node.end_lineno or 0) - node.lineno + 1 for path, node in functions(trees)}
    for limit in (60, 80):
        longer = [f"{where}: {length} lines" for where, length in lengths.items() if length > limit]
        assert len(longer) <= LIMITS[f"functions over {limit} lines"], "\n".join(longer)


def test_functions_have_few_parameters(trees: dict[Path, ast.Module]) -> None:
    many = []
    for path, node in functions(trees):
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        if len(names) - (names[:1] in (["self"], ["cls"])) > 6:
            many.append(f"{place(path, node)}: {node.name}")
    assert len(many) <= LIMITS["functions with over 6 parameters"], "\n".join(many)
