"""The site as readers have it: built, every link and anchor followed, and opened in a browser on a desk and a phone."""

import functools
import http.server
import importlib
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import mechanisms_picture
import pytest
import strategies_picture
from browser import CHROMIUM, Browser

import jaxpar as jp

ROOT = Path(__file__).parents[1]
PAGES = sorted(page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md"))
# Packages that show names of their rooms. Not `step.rows` and `parallel.tensor`, which serve the step alone.
MODULES = ["collectives", "data", "forecast.own_step", "hardware", "models", "models.llama", "parallel", "parity"]
MODULES += [f"inspect.{name}" for name in ("check", "explain", "predict")]
MOST_ENTRIES = 40  # names that a page of the API explains, members included
DESK, PHONE = 1280, 390
# Of these most have changed when something is broken for all; `make battery` opens every page in every way.
SAMPLE = ("", "choose/", "strategies/zero2/", "api/step/", "explain/")
pytestmark = pytest.mark.xdist_group("site")


# -- what the pages' sources say ---------------------------------------------------------------------------------------


def documented() -> dict[str, list[str]]:
    """Dotted name -> the API pages on which it stands."""
    found: dict[str, list[str]] = {}
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for dotted in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
            found.setdefault(dotted, []).append(page.name)
    return found


def resolve(dotted: str) -> object:
    """The object of a dotted name: attributes of the longest part of it that is a module."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[end:], found)
    raise AssertionError(f"docs/api names {dotted}, which is not there")


def public() -> set[str]:
    names = {f"jaxpar.{name}" for name in jp.__all__ if name != "collectives"}
    for module in MODULES:
        source = (ROOT / "jaxpar" / module.replace(".", "/") / "__init__.py").read_text()
        shown = re.findall(r"^from \.[\w.]* import (\w+) as \1$", source, re.MULTILINE)
        found = importlib.import_module(f"jaxpar.{module}")
        names |= {f"jaxpar.{module}.{name}" for name in shown if not isinstance(getattr(found, name), type(sys))}
        own = [n for n, x in vars(found).items() if getattr(x, "__module__", "") == found.__name__ and n[0] != "_"]
        names |= {f"jaxpar.{module}.{name}" for name in own}
    return names


def test_every_public_name_stands_on_one_api_page() -> None:
    pages = documented()
    twice = {dotted: where for dotted, where in pages.items() if len(where) > 1}
    assert not twice
    # One thing has several names: `jaxpar.verify` is that of `jaxpar.parity`.
    by_thing: dict[int, list[str]] = {}
    for dotted in pages:
        by_thing.setdefault(id(resolve(dotted)), []).append(dotted)
    assert not [names for names in by_thing.values() if len(names) > 1]
    missing = sorted(name for name in public() if id(resolve(name)) not in by_thing)
    assert not missing, f"docs/api lacks {missing}"


def test_the_picture_of_the_home_page_is_what_the_layouts_say() -> None:
    drawn = (ROOT / "docs" / "assets" / "strategies.svg").read_text()
    assert drawn == strategies_picture.svg(strategies_picture.rows()), "run experiments/strategies_picture.py"


@pytest.mark.parametrize("name", mechanisms_picture.DRAWN)
def test_pictures_of_mechanisms_are_what_their_programs_do(name: str) -> None:
    drawn = (ROOT / "docs" / "assets" / f"{name}.svg").read_text()
    assert drawn == mechanisms_picture.DRAWN[name](), "run experiments/mechanisms_picture.py"


def test_every_picture_of_a_pipeline_is_wide_on_a_phone() -> None:
    """By the style sheet, which is all there is to look at without a browser."""
    rules = re.findall(r"img:is\((.*?)\)\)? \{ (.*?) \}", (ROOT / "docs" / "assets" / "site.css").read_text())
    (moved,) = [selectors for selectors, style in rules if style == "overflow-x: auto;"]
    kept = [selectors for selectors, style in rules if "min-width" in style and "max-width: none" in style]
    assert sorted(moved.split(", ")) == sorted(", ".join(kept).split(", "))
    for picture in (ROOT / "docs" / "assets").glob("*.svg"):
        if picture.name.startswith(("pipe", "tutorial-")):
            assert f'[src*="assets/{picture.name.split("-")[0].partition(".")[0]}' in moved


# -- what was built ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from a copy of what it is made of, so that the folder `site` of the tree stays as it is."""
    here = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", here / "docs")
    shutil.copy(ROOT / "zensical.toml", here)
    (here / "jaxpar").symlink_to(ROOT / "jaxpar")
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return here / "site"


class Links(HTMLParser):
    """What a page points to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = {"", "__skip"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[key] for key in ("id", "name") if key in found}
        self.targets += [found[key] for key in ("href", "src") if key in found]


def address(page: Path) -> str:
    """The address of a source page in the site: "plan.md" -> "plan/"."""
    return "" if page.name == "index.md" else f"{page.with_suffix('')}/"


def test_links_and_anchors_of_the_site_lead_somewhere(site: Path) -> None:
    pages = {address(page): Links((site / address(page) / "index.html").read_text()) for page in PAGES}
    broken = []
    for here, page in pages.items():
        for target in page.targets:
            whole, anchor = urldefrag(urljoin(f"http://site/{here}", target))
            if urlsplit(target).scheme:  # of others
                continue
            path = unquote(urlsplit(whole).path).lstrip("/")
            there = pages.get(path)
            if there is None and not (site / path).is_file():
                broken.append(f"{here}: {target}")
            if there is not None and unquote(anchor) not in there.anchors:
                broken.append(f"{here}: {target} has no such anchor")
    assert not broken


def test_no_page_of_the_api_is_endless(site: Path) -> None:
    """All of the API was one page of 88,000 pixels. A limit in pixels measured the fonts of the machine: with those of
    Debian a page was 36 pixels too high, and `make test` failed.
    """
    entries = {page: (site / address(page) / "index.html").read_text().count('"doc doc-heading"') for page in PAGES}
    assert max(entries.values()) > 0
    assert not {str(page): number for page, number in entries.items() if number > MOST_ENTRIES}


# -- what a browser shows ----------------------------------------------------------------------------------------------


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def home(site: Path) -> Iterator[str]:
    """The address of the site, served from this process."""
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on PATH; on Debian: apt install chromium")
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    opened.open("data:text/html,<span>text</span>")
    # Without a font nothing has a size, and the search field never takes the focus.
    if draws_text := opened.run("document.querySelector('span').getBoundingClientRect().width") > 0:
        yield opened
    opened.close()
    if not draws_text:
        pytest.skip("Chromium finds no font; on Debian: apt install fonts-liberation")


# Elements that reach beyond the window.
WIDE = """[...document.querySelectorAll(".md-content *")].filter(x => x.getBoundingClientRect().right > innerWidth + 1
    && !x.closest("pre, table, .md-typeset__scrollwrap, .arithmatex")).map(x => x.outerHTML.slice(0, 120))"""
# Elements that hide a part of what they hold.
CUT = """[...document.querySelectorAll(".md-content *")].filter(x => {
    const hides = how => ["hidden", "clip"].includes(how), style = getComputedStyle(x);
    return x.clientWidth && hides(style.overflowX) && x.scrollWidth > x.clientWidth + 1
        || x.clientHeight && hides(style.overflowY) && x.scrollHeight > x.clientHeight + 1;
}).map(x => x.outerHTML.slice(0, 120))"""
MISSING = "[...document.images].filter(x => x.complete && !x.naturalWidth).map(x => x.src)"
# Short names that stand on two lines: code that is drawn as several boxes.
BROKEN = """[...document.querySelectorAll(".md-content :is(p, li, td) code")].filter(
    x => x.textContent.length <= 24 && x.getClientRects().length > 1).map(x => x.textContent)"""


def look_at(browser: Browser, home: str, pages: list[str]) -> None:
    for page in pages:
        browser.said.clear()
        browser.open(home + page)
        assert browser.said == [], (page, browser.said)
        assert browser.run(MISSING) == [], page
        assert browser.run(WIDE) == [], page
        assert browser.run(CUT) == [], page
        width = browser.run("document.documentElement.clientWidth")
        assert browser.run("document.documentElement.scrollWidth") <= width, page
        assert browser.run(BROKEN) == [], page


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_pages_load_and_fit(site: Path, home: str, browser: Browser, width: int) -> None:
    browser.look(width)
    look_at(browser, home, list(SAMPLE))


def test_what_is_cut_or_too_wide_is_found(site: Path, home: str, browser: Browser) -> None:
    """The two questions of `look_at` find what they ask for, whatever fonts are installed."""
    browser.look(PHONE)
    browser.open(home)
    wide = '<p id="wide" style="width: 2000px"></p>'
    cut = '<p id="cut" style="overflow: hidden; height: 9px"><b style="display: block; height: 99px"></b></p>'
    browser.run(f"document.querySelector('.md-content').innerHTML += {wide + cut!r}")
    assert 'id="wide"' in browser.run(WIDE)[0]
    assert 'id="cut"' in browser.run(CUT)[0]


@pytest.mark.battery
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [DESK, PHONE])
def test_every_page_loads_and_fits(site: Path, home: str, browser: Browser, width: int, dark: bool) -> None:
    browser.look(width, dark=dark)
    look_at(browser, home, [address(page) for page in PAGES])


def test_colours_follow_the_system(site: Path, home: str, browser: Browser) -> None:
    """With two palettes, what the first page was shown in stayed, whatever the system said later."""
    for dark in (False, True, False):
        browser.look(DESK, dark=dark)
        browser.open(home)
        shown = browser.run("getComputedStyle(document.body).backgroundColor")
        brightness = max(map(int, re.findall(r"\d+", shown)[:3]))
        assert (brightness < 64) == dark, shown


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("ZeRO-2", "strategies/zero2"),
        ("FSDP", "strategies/zero3"),
        ("DistributedSampler", "from-pytorch"),
        ("gradient accumulation", "recipes/optimizers"),
    ],
)
def test_search_finds_the_page(text: str, page: str, site: Path, home: str, browser: Browser) -> None:
    browser.look(DESK)
    browser.open(home)
    browser.wait("document.querySelector('.md-search__button') != null")
    browser.run("document.querySelector('.md-search__button').click()")
    inside = "[...document.querySelectorAll('*')].filter(x => x.shadowRoot).map(x => x.shadowRoot)"  # its own widget
    browser.wait(f"{inside}.some(x => x.activeElement?.tagName == 'INPUT')")
    browser.call("Input.insertText", text=text)
    found = f"{inside}.flatMap(x => [...x.querySelectorAll('a')]).map(x => x.href)"
    browser.wait(f"{found}.some(x => x.includes('/{page}/'))")


def test_a_snippet_is_copied(site: Path, home: str, browser: Browser) -> None:
    browser.look(DESK)
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"], origin=home)
    browser.call("Emulation.setFocusEmulationEnabled", enabled=True)  # only a page that has the focus may copy
    browser.open(home)
    browser.wait("document.querySelector('.md-code__button') != null")
    browser.run("document.querySelector('.md-code__button').click()")
    snippets = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE | re.DOTALL)
    assert browser.wait("navigator.clipboard.readText()").strip() == snippets[0].strip()
