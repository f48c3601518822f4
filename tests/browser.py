"""Look at web pages in headless Chromium."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")

# Loads one page after the other into a frame of each width, and lists those that are wider, or have a box of which a
# part must be scrolled to.
_CHECK = """<!DOCTYPE html><body><pre id="found"></pre><script>
const pages = PAGES, found = [];
async function load(page, width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  await new Promise((done) => { frame.onload = done; frame.src = page; document.body.append(frame); });
  const inner = frame.contentDocument.scrollingElement;
  if (inner.scrollWidth > width) found.push(`${page} is ${inner.scrollWidth} wide in ${width}`);
  for (const box of frame.contentDocument.querySelectorAll(".wide"))
    if (box.scrollWidth > box.clientWidth) found.push(`${page} has ${box.scrollWidth} in a box of ${box.clientWidth}`);
  frame.remove();
}
(async () => {
  for (const page of pages) for (const width of WIDTHS) await load(page, width);
  document.getElementById("found").textContent = JSON.stringify([pages.length, found]);
})();
</script></body>"""


def find_cut_pages(pages: Sequence[Path], widths: Sequence[int], folder: Path) -> list[str]:
    """Return which pages do not fit windows of these widths in pixels; ``folder``: for the browser's files."""
    check = folder / "check.html"
    urls = json.dumps([page.as_uri() for page in pages])
    check.write_text(_CHECK.replace("PAGES", urls).replace("WIDTHS", json.dumps(widths)), encoding="utf-8")
    shown = re.search(r'<pre id="found">(.*?)</pre>', show_page(check.as_uri(), folder), re.DOTALL)
    assert shown is not None
    count, found = json.loads(html.unescape(shown[1]))
    assert count == len(pages)
    return list(map(str, found))


def show_page(url: str, folder: Path) -> str:
    """Return a page as the browser has it after its scripts have run; ``folder``: for the browser's files."""
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    return subprocess.run(
        ["chromium", *options, f"--user-data-dir={folder}/profile", "--virtual-time-budget=60000", "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
