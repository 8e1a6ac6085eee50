"""The page docs/tutorial.md: docs/tutorial.ipynb with what its cells print and draw. Nothing runs.

python experiments/tutorial_page.py
"""

import json
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def rendered() -> dict[str, str]:
    """The page and its pictures: paths below docs -> their text."""
    parts, files = list[str](), dict[str, str]()
    for cell in json.loads((DOCS / "tutorial.ipynb").read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```py\n{source}\n```")
        for out in cell.get("outputs", []):
            if out["output_type"] == "stream":
                parts.append(f"```text\n{''.join(out['text']).rstrip()}\n```")
            elif svg := "".join(out["data"].get("image/svg+xml", "")):
                name = f"assets/tutorial-{source.split()[1].rstrip('.')}.svg"
                title = svg.partition("<title>")[2].partition("</title>")[0]
                files[name] = svg.rstrip() + "\n"
                parts.append(f"![{title or 'What the cell draws'}]({name})")
    head, *rest = parts
    title, _, said = head.partition("\n\n")
    note = "As a notebook, to be run and changed: [`tutorial.ipynb`](tutorial.ipynb). Outputs are those stored in it."
    return files | {"tutorial.md": "\n\n".join([title, note, said, *rest]) + "\n"}


if __name__ == "__main__":
    for name, text in rendered().items():
        (DOCS / name).write_text(text)
