"""A page in a real browser, headless: what it lays out, what it fetches, which errors it reports."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--virtual-time-budget=10000",
)  # fmt: skip
HARNESS = """<!doctype html><meta charset="utf-8"><iframe id="frame" style="border:0;height:800px;width:{width}px"></iframe>
<pre id="found"></pre>
<script>
const errors = [], note = event => errors.push(String(event.message)), frame = document.getElementById("frame");
const view = frame.contentWindow, inner = frame.contentDocument;
addEventListener("error", note);
inner.open();  // forgets all listeners, so those of the page are added after it, before anything is read
view.addEventListener("error", note);
view.addEventListener("load", () => {{
  const boxes = [...inner.querySelectorAll("main > *")].map(item => item.getBoundingClientRect());
  document.getElementById("found").textContent = JSON.stringify({{
    width: inner.documentElement.clientWidth, content: inner.documentElement.scrollWidth,
    sections: [...inner.querySelectorAll("h1, h2")].map(item => item.textContent.trim()),
    empty: boxes.filter(box => box.height === 0).length,
    fetched: view.performance.getEntriesByType("resource").map(entry => entry.name),
    scripts: inner.scripts.length, background: view.getComputedStyle(inner.body).backgroundColor, errors,
  }});
}});
inner.write({page});
inner.close();
</script>"""


def looked_at(page: str, width: int, dark: bool = False) -> dict:
    """What a browser finds in the HTML `page`, `width` pixels wide: width of view and content, headings, empty blocks, fetched
    addresses, number of scripts, background colour, errors from its first byte until it is loaded."""
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(page).replace("<", "\\u003c")
        harness = Path(folder, "harness.html")
        harness.write_text(HARNESS.format(width=width, page=text), encoding="utf-8")
        shown = _run("--dump-dom", *scheme, f"--user-data-dir={folder}/profile", harness.as_uri())
    found = re.search(r'<pre id="found">(.*?)</pre>', shown, re.DOTALL)
    return json.loads(html.unescape(found.group(1)))


def print_to_pdf(page: str, folder: Path) -> bytes:
    """The HTML `page` as a browser prints it; `folder` is one to work in."""
    source, printed = folder / "page.html", folder / "page.pdf"
    source.write_text(page, encoding="utf-8")
    _run(f"--print-to-pdf={printed}", f"--user-data-dir={folder}/profile", source.as_uri())
    return printed.read_bytes()


def _run(*arguments: str) -> str:
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.fail("This test needs a browser: install Chromium (Debian: apt-get install chromium).")
    return subprocess.run([browser, *FLAGS, *arguments], capture_output=True, text=True, timeout=120, check=True).stdout
